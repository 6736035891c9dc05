"""A file descriptor by which one thread wakes another."""

from __future__ import annotations

import os
import weakref


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
