"""Who wants to know when something is no longer what it was."""

from __future__ import annotations

from collections.abc import Callable


class Changes:
    """Tells that something has changed, not what: those who watch look for themselves. Lives on the event loop."""

    def __init__(self) -> None:
        self._watchers: list[Callable[[], None]] = []

    def watch(self, tell: Callable[[], None]) -> None:
        self._watchers.append(tell)

    def tell(self) -> None:
        for each in self._watchers:
            each()
