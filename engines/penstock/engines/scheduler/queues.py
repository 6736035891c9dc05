"""The order of waiting requests: policies as keys that are fixed at arrival, and the queue that orders by them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from enum import StrEnum
from typing import Protocol

from penstock.engines.scheduler.request import OrderKey, Request


class Policy(StrEnum):
    FCFS = "fcfs"
    PRIORITY = "priority"
    FAIR = "fair"


def order_key(policy: Policy, request: Request, ageing_seconds: float) -> OrderKey:
    """Lower is earlier: requests in the background come behind all others. Ties go to the lower id."""
    since = aged(policy, request.arrival_time, request.priority, ageing_seconds)
    return (request.background, since, request.id)


def aged(policy: Policy, since: float, priority: int, ageing_seconds: float) -> float:
    """Since when what waits since then counts as waiting, by its priority.

    With linear ageing, "priority p, waiting since t" is at every moment as urgent as "priority 0, waiting since
    t + p * ageing_seconds". So priorities with ageing need no clock and no re-sorting.
    """
    return since + priority * ageing_seconds if policy is Policy.PRIORITY else since


class RequestQueue(Protocol):
    """Requests that wait, the next one first. A preempted one comes back with its old key, so ahead of later ones."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Request]: ...
    def push(self, request: Request) -> None: ...
    def peek(self) -> Request | None: ...
    def pop(self) -> Request: ...
    def remove(self, request: Request) -> None: ...
    def charge(self, request: Request, num_computed: int) -> None:
        """Charges the request's tenant for its first `num_computed` tokens: they are computed, or about to be."""
        ...


class KeyedQueue:
    """A heap by key. Removal is lazy: O(1) now, the entry goes when it reaches the top or half of the heap is dead."""

    def __init__(self) -> None:
        self._heap: list[tuple[OrderKey, int, Request]] = []
        self._live: dict[int, int] = {}
        """Request id -> number of its entry; other entries of the same request are dead."""
        self._num_pushed = 0

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        return (request for _, number, request in self._heap if self._live.get(request.id) == number)

    def push(self, request: Request) -> None:
        self._num_pushed += 1
        self._live[request.id] = self._num_pushed
        heapq.heappush(self._heap, (request.key, self._num_pushed, request))

    def peek(self) -> Request | None:
        heap = self._heap
        while heap:
            _, number, request = heap[0]
            if self._live.get(request.id) == number:
                return request
            heapq.heappop(heap)
        return None

    def pop(self) -> Request:
        request = self.peek()
        if request is None:
            raise IndexError("the queue is empty")
        heapq.heappop(self._heap)
        del self._live[request.id]
        return request

    def remove(self, request: Request) -> None:
        del self._live[request.id]
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = [entry for entry in self._heap if self._live.get(entry[2].id) == entry[1]]
            heapq.heapify(self._heap)

    def charge(self, request: Request, num_computed: int) -> None:
        """Order does not depend on service."""
