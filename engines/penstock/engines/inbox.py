"""What threads have to say to a loop."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from penstock.engines.bell import Bell

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
