"""Observers of something that changes."""

from __future__ import annotations

from collections.abc import Callable


class Changes:
    """Tells its watchers that something has changed, but not what: they look for themselves. Lives on the event
    loop."""

    def __init__(self) -> None:
        self._watchers: list[Callable[[], None]] = []

    def watch(self, tell: Callable[[], None]) -> None:
        self._watchers.append(tell)

    def tell(self) -> None:
        for watcher in self._watchers:
            watcher()
