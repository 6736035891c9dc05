"""Queues for a policy: by key, or by the virtual token counters of tenants (policy `fair`)."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from penstock.engines.scheduler.queues import KeyedQueue, Policy, RequestQueue
from penstock.engines.scheduler.request import Request

INPUT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0
_PRUNE_ABOVE = 1024


def make_queue(policy: Policy) -> RequestQueue:
    return BackgroundLast(FairQueue(), FairQueue()) if policy is Policy.FAIR else KeyedQueue()


class BackgroundLast:
    """Two queues, for an order that is not by key. Nothing in the background is next while others wait, and what
    tenants compute there counts only there."""

    def __init__(self, foreground: RequestQueue, background: RequestQueue) -> None:
        self.foreground = foreground
        self.background = background

    def __len__(self) -> int:
        return len(self.foreground) + len(self.background)

    def __iter__(self) -> Iterator[Request]:
        yield from self.foreground
        yield from self.background

    def push(self, request: Request) -> None:
        self._of(request).push(request)

    def peek(self) -> Request | None:
        return self.foreground.peek() or self.background.peek()

    def pop(self) -> Request:
        return (self.foreground if len(self.foreground) else self.background).pop()

    def remove(self, request: Request) -> None:
        self._of(request).remove(request)

    def charge(self, request: Request, num_computed: int) -> None:
        self._of(request).charge(request, num_computed)

    def _of(self, request: Request) -> RequestQueue:
        return self.background if request.background else self.foreground


class FairQueue:
    """Fair queueing between tenants by virtual token counters (Sheng et al., "Fairness in Serving Large Language
    Models", OSDI 2024): the tenant that has been served least goes first, and none saves up credit while idle.

    One KeyedQueue per tenant, and a heap of the tenants that have requests waiting, by their counters.

    Counters only grow, so a stale heap entry is always too low: it is corrected when it reaches the top.
    """

    def __init__(self) -> None:
        self._queues: dict[str, KeyedQueue] = {}
        self._counters: dict[str, float] = {}
        self._backlogged: list[tuple[float, str]] = []
        self._in_heap: set[str] = set()
        self._floor = 0.0
        """No waiting tenant's counter is below this; it only grows."""
        self._served_last = ""
        self._size = 0
        self._prune_at = _PRUNE_ABOVE

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        return (request for queue in self._queues.values() for request in queue)

    def counter(self, tenant: str) -> float:
        """Weighted tokens served to a tenant, raised to the others' level whenever it was idle and comes back."""
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

    def charge(self, request: Request, num_computed: int) -> None:
        """Adds what is computed for the first time; prefix hits cost nothing, nor does recomputation."""
        known = request.charged_tokens
        if num_computed <= known:
            return
        input_tokens = max(0, min(num_computed, request.num_prompt_tokens) - known)
        output_tokens = num_computed - known - input_tokens
        request.charged_tokens = num_computed
        self._counters[request.tenant] = (
            self.counter(request.tenant) + INPUT_WEIGHT * input_tokens + OUTPUT_WEIGHT * output_tokens
        )

    def _raise_floor(self) -> None:
        """To the lowest counter of those that wait; if none waits, to that of the tenant that was served last."""
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
        """Forgets idle tenants that would be raised to the floor anyway: callers choose names, so there may be many."""
        if len(self._counters) >= self._prune_at:
            self._counters = {t: c for t, c in self._counters.items() if t in self._queues or c > self._floor}
            self._prune_at = max(_PRUNE_ABOVE, 2 * len(self._counters))
