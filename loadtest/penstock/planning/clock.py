"""Virtual time: what happens when, without anybody waiting for it."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf

Action = Callable[[], None]


class EventQueue:
    """Actions in the order of their times; those of one moment in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds since the beginning."""
        self._heap: list[tuple[float, int, Action]] = []
        self._added = 0

    def at(self, when: float, action: Action) -> None:
        """A time that is over means now."""
        self._added += 1
        heapq.heappush(self._heap, (max(when, self.now), self._added, action))

    def after(self, seconds: float, action: Action) -> None:
        self.at(self.now + seconds, action)

    def run(self, until: Callable[[], bool], most: float = inf) -> None:
        """Until nothing is left, `until` is true, or the next action is later than `most` seconds."""
        heap = self._heap
        while heap and not until() and heap[0][0] <= most:
            self.now, _, action = heapq.heappop(heap)
            action()
