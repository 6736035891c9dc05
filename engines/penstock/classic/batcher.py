"""The dynamic batcher: which of the waiting requests are executed next, and when. No clock, no loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic

from penstock.classic.model_config import ModelConfig, ModelQueuePolicy
from penstock.classic.queue import PriorityQueue, W
from penstock.engines.errors import PenstockError


class DynamicBatcher(Generic[W]):
    """Triton's rules. Without `dynamic_batching` requests are executed one by one, in the order of their arrival.

    A batch is a run of requests from the head of the queue that have equal shapes and together at most
    `max_batch_size` inferences. It goes as soon as it has a preferred size, cannot grow any more, or its oldest
    request has waited for `max_queue_delay_microseconds`; preferred size by default is `max_batch_size`.
    """

    shared = True
    """Any instance can take the next batch."""

    def __init__(self, config: ModelConfig) -> None:
        batching = config.dynamic_batching
        self._max_size = max(1, config.max_batch_size)
        self._dynamic = config.HasField("dynamic_batching")
        self._preferred = frozenset(batching.preferred_batch_size) or frozenset({self._max_size})
        self._largest_preferred = max(self._preferred)
        self._delay_ns = batching.max_queue_delay_microseconds * 1000
        self._joins: Callable[[W], bool | None] | None = None
        """Of custom batching: whether a request joins the batch that is formed. False: the batch is complete without
        it; a first one goes alone. None: the request is in no batch, and will leave the queue."""
        self.delay_ends = 0
        """When the batch goes that `take` has not given yet; of use after an empty `take` from a queue that is not."""
        if self._dynamic:
            self.queue: PriorityQueue[W] = PriorityQueue(
                batching.default_queue_policy,
                batching.priority_levels,
                batching.default_priority_level,
                dict(batching.priority_queue_policy),
            )
        else:
            self.queue = PriorityQueue(ModelQueuePolicy())

    def __len__(self) -> int:
        return len(self.queue)

    def __iter__(self) -> Iterator[W]:
        return iter(self.queue)

    def add(self, item: W, now_ns: int) -> None:
        """Raises QueueFullError."""
        self.queue.push(item, now_ns)

    def remove(self, item: W) -> bool:
        """Takes a request out that nobody waits for any more; False when it is not in the queue."""
        return self.queue.remove(item)

    def expire(self, now_ns: int) -> list[tuple[W, PenstockError]]:
        """Requests that end now without having been executed."""
        return self.queue.expire(now_ns)

    def due(self, now_ns: int, instance: int = 0) -> bool:
        """Whether `take` would give a batch."""
        return bool(self.queue) and (not self._dynamic or bool(self._next_batch(now_ns)))

    def take(self, now_ns: int, instance: int = 0) -> list[W]:
        """The next batch, for whichever instance; empty when nothing is to be executed now. Call `expire` first."""
        if not self.queue:
            return []
        batch = self._next_batch(now_ns) if self._dynamic else [next(iter(self.queue))]
        for item in batch:
            self.queue.remove(item)
        return batch

    def next_expiry(self) -> int | None:
        """When `expire` will find something."""
        return self.queue.next_expiry()

    def _next_batch(self, now_ns: int) -> list[W]:
        batch: list[W] = []
        size = 0
        best = 0  # requests in the largest batch of a preferred size
        full = False
        joins = self._joins
        shapes: object = None
        oldest = now_ns
        for item in self.queue:
            if batch:
                if not best and size + item.size > self._largest_preferred:
                    best = len(batch)
                if size + item.size > self._max_size or item.shapes != shapes:
                    full = True
                    break
            else:
                shapes = item.shapes
            if joins is not None:
                verdict = joins(item)
                if verdict is None:
                    continue
                full = not verdict
                if full and batch:
                    break
            batch.append(item)
            size += item.size
            if item.arrived_ns < oldest:
                oldest = item.arrived_ns
            if size in self._preferred:
                best = len(batch)
            if full or size >= self._max_size:
                full = True
                break
        waited = now_ns - oldest >= self._delay_ns
        if best and not (self._delay_ns and waited):
            del batch[best:]
        elif not (full or waited or size >= self._largest_preferred):
            self.delay_ends = oldest + self._delay_ns
            return []
        return batch
