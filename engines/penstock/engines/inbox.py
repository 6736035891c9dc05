"""The inbox of a loop for what threads have to say, and the bell that wakes it."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Generic, TypeVar


class Bell:
    """`wakeup` is readable from `ring` to `silence`, however often it is rung. The owner guards all calls by a lock."""

    def __init__(self) -> None:
        self.wakeup, self._far_end = os.pipe()
        self._rung = False
        self._close = weakref.finalize(self, _close, self.wakeup, self._far_end)  # owners may be dropped unclosed

    def ring(self) -> None:
        """Nothing happens once it is closed."""
        if not self._rung and self._close.alive:
            os.write(self._far_end, b"!")
            self._rung = True

    def silence(self) -> None:
        """Nothing happens once it is closed: the descriptor may be another file's by now."""
        if self._rung and self._close.alive:
            os.read(self.wakeup, 1)
            self._rung = False

    def close(self) -> None:
        self._close()


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


T = TypeVar("T")


class Inbox(Generic[T]):
    """Threads put items in, and the loop takes all of them at once, in their order. `wakeup` is a file descriptor that
    is readable while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Guards the next two."""
        self._items: list[T] = []
        self._bell = Bell()
        self.wakeup = self._bell.wakeup

    def put(self, item: T) -> None:
        with self._lock:
            self._items.append(item)
            self._bell.ring()

    def take(self) -> list[T]:
        if not self._items:  # most steps of an engine; what is being put in now rings after this look
            return []
        with self._lock:
            items, self._items = self._items, []
            self._bell.silence()
        return items

    def close(self) -> None:
        """Closes `wakeup`. A thread may still put something in, which wakes nobody."""
        with self._lock:
            self._bell.close()
