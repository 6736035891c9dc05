"""Fair queueing between tenants by virtual token counters (Sheng et al., "Fairness in Serving Large Language Models",
OSDI 2024): whoever has been served least goes first, and nobody saves up credit while idle."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from penstock.engines.scheduler.queue import KeyedQueue
from penstock.engines.scheduler.request import Request

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
_PRUNE_ABOVE = 1024


class FairQueue:
    """One KeyedQueue per tenant, and a heap of the tenants that have requests waiting, by their counters.

    Counters only grow, so a stale heap entry is always too low: it is corrected when it surfaces.
    """

    def __init__(self) -> None:
        self._queues: dict[str, KeyedQueue] = {}
        self._counters: dict[str, float] = {}
        self._backlogged: list[tuple[float, str]] = []
        self._in_heap: set[str] = set()
        self._floor = 0.0
        """No tenant that waits is below; it only grows."""
        self._served_last = ""
        self._size = 0
        self._prune_at = _PRUNE_ABOVE

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        return (request for queue in self._queues.values() for request in queue)

    def counter(self, tenant: str) -> float:
        """Weighted tokens served to a tenant, lifted to the others' level whenever it comes back from idleness."""
        return self._counters.get(tenant, 0.0)

    def push(self, request: Request) -> None:
        tenant = request.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            self._raise_floor()
            self._prune()
            self._counters[tenant] = max(self.counter(tenant), self._floor)
            queue = self._queues[tenant] = KeyedQueue()
            if tenant not in self._in_heap:
                self._in_heap.add(tenant)
                heapq.heappush(self._backlogged, (self._counters[tenant], tenant))
        queue.push(request)
        self._size += 1

    def peek(self) -> Request | None:
        lowest = self._lowest()
        return None if lowest is None else self._queues[lowest[1]].peek()

    def pop(self) -> Request:
        lowest = self._lowest()
        if lowest is None:
            raise IndexError("the queue is empty")
        self._floor, tenant = lowest
        self._served_last = tenant
        request = self._queues[tenant].pop()
        self._size -= 1
        self._drop_if_empty(tenant)
        return request

    def remove(self, request: Request) -> None:
        queue = self._queues[request.tenant]
        queue.remove(request)
        self._size -= 1
        self._drop_if_empty(request.tenant)

    def charge(self, request: Request) -> None:
        """Adds what has been computed for the first time; prefix hits cost nothing, nor does recomputation."""
        known, served = request.charged_tokens, request.num_computed_tokens
        if served <= known:
            return
        input_tokens = max(0, min(served, request.num_prompt_tokens) - known)
        output_tokens = served - known - input_tokens
        request.charged_tokens = served
        self._counters[request.tenant] = (
            self.counter(request.tenant) + INPUT_WEIGHT * input_tokens + OUTPUT_WEIGHT * output_tokens
        )

    def _raise_floor(self) -> None:
        """To the lowest of those that wait; when nobody does, to the tenant that was served last."""
        lowest = self._lowest()
        level = self.counter(self._served_last) if lowest is None else lowest[0]
        self._floor = max(self._floor, level)

    def _lowest(self) -> tuple[float, str] | None:
        heap = self._backlogged
        while heap:
            counter, tenant = heap[0]
            if tenant not in self._queues:
                heapq.heappop(heap)
                self._in_heap.discard(tenant)
            elif counter < self._counters[tenant]:
                heapq.heapreplace(heap, (self._counters[tenant], tenant))
            else:
                return heap[0]
        return None

    def _drop_if_empty(self, tenant: str) -> None:
        if not len(self._queues[tenant]):
            del self._queues[tenant]

    def _prune(self) -> None:
        """Forgets idle tenants that would be lifted to the floor anyway: names are the callers', memory is ours."""
        if len(self._counters) >= self._prune_at:
            self._counters = {t: c for t, c in self._counters.items() if t in self._queues or c > self._floor}
            self._prune_at = max(_PRUNE_ABOVE, 2 * len(self._counters))
