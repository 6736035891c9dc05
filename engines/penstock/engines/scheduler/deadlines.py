"""Deadlines of all live requests, cheapest to ask "who is due?": a heap, not a scan of the queue."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Deadlines:
    """Entries of finished requests stay until they surface or until most of the heap is stale."""

    def __init__(self, is_live: Callable[[int], bool]) -> None:
        self._is_live = is_live
        self._heap: list[tuple[float, int]] = []
        self._compact_at = 1024

    def add(self, deadline: float, request_id: int) -> None:
        heapq.heappush(self._heap, (deadline, request_id))
        if len(self._heap) > self._compact_at:
            self._heap = [entry for entry in self._heap if self._is_live(entry[1])]
            heapq.heapify(self._heap)
            self._compact_at = max(1024, 2 * len(self._heap))

    def due(self, now: float) -> list[int]:
        """Takes out the ids whose time has come; finished ones may be among them."""
        ids = []
        while self._heap and self._heap[0][0] <= now:
            ids.append(heapq.heappop(self._heap)[1])
        return ids

    def next(self) -> float | None:
        """The earliest deadline of a live request."""
        while self._heap and not self._is_live(self._heap[0][1]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
