"""Waiting queues. All of them order by `Request.key`; the fair one also by tenant."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Protocol

from penstock.engines.scheduler.request import Request


class RequestQueue(Protocol):
    """Requests that wait, the next one first. A preempted one comes back with its old key, so ahead of later ones."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...
    def push(self, request: Request) -> None: ...
    def peek(self) -> Request | None: ...
    def pop(self) -> Request: ...
    def remove(self, request: Request) -> None: ...
    def charge(self, request: Request) -> None:
        """Tells that `request.num_computed_tokens` has grown."""
        ...


class KeyedQueue:
    """A heap by key. Removal is lazy: O(1) now, the entry goes when it surfaces or half of the heap is dead."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], Request]] = []
        self._live: set[int] = set()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, request in self._heap if request.id in self._live)

    def push(self, request: Request) -> None:
        self._live.add(request.id)
        heapq.heappush(self._heap, (request.key, request))

    def peek(self) -> Request | None:
        heap = self._heap
        while heap:
            request = heap[0][1]
            if request.id in self._live:
                return request
            heapq.heappop(heap)
        return None

    def pop(self) -> Request:
        request = self.peek()
        if request is None:
            raise IndexError("the queue is empty")
        heapq.heappop(self._heap)
        self._live.discard(request.id)
        return request

    def remove(self, request: Request) -> None:
        self._live.discard(request.id)
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = [entry for entry in self._heap if entry[1].id in self._live]
            heapq.heapify(self._heap)

    def charge(self, request: Request) -> None:
        """Order does not depend on service."""
