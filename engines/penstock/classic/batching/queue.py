"""The waiting requests of one model (priority levels, queue policies, expiry) and the dynamic batcher, which chooses
those that are executed next. No clock, no loop: times are passed in, in nanoseconds of time.monotonic_ns().
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from typing import Generic, TypeVar

from penstock.classic.model_config import ModelConfig, ModelQueuePolicy
from penstock.engines.errors import DeadlineExceededError, PenstockError, QueueFullError, QueueTimeoutError

DEADLINE_TEXT = "the deadline of the request has passed"


class QueueEntry:
    """What can stand in a queue."""

    __slots__ = ("arrived_ns", "deadline_ns", "expires_ns", "level", "priority", "shapes", "size", "timeout_us")

    def __init__(self, size: int = 1, priority: int = 0, timeout_us: int = 0, deadline_ns: int = 0) -> None:
        self.size = size
        """Inferences: the batch size, at least 1."""
        self.priority = priority
        self.timeout_us = timeout_us
        self.deadline_ns = deadline_ns
        """0: none."""
        self.shapes: object = None
        """Only requests with equal ones can share a batch."""
        self.arrived_ns = 0
        self.expires_ns = 0
        """When its queue policy acts, 0: never."""
        self.level: Level | None = None
        """Where it waits; None when it does not."""


W = TypeVar("W", bound=QueueEntry)


class Level:
    """The requests of one priority, in the order of their arrival."""

    __slots__ = ("delayed", "delays", "max_size", "override", "priority", "timeout_us", "waiting")

    def __init__(self, priority: int, policy: ModelQueuePolicy) -> None:
        self.priority = priority
        self.max_size = policy.max_queue_size
        self.timeout_us: int = policy.default_timeout_microseconds
        self.override = policy.allow_timeout_override
        self.delays = policy.timeout_action == ModelQueuePolicy.DELAY
        self.waiting: OrderedDict[QueueEntry, None] = OrderedDict()
        self.delayed: OrderedDict[QueueEntry, None] = OrderedDict()
        """Requests whose time is over under the action DELAY: they go after all others of the level."""

    def timeout_of(self, item: QueueEntry) -> int:
        """Microseconds, 0: for ever. A request may only shorten what the policy gives it.

        Triton ignores the caller's timeout where the policy has none to shorten; here for ever can be shortened too,
        since the configuration and the caller both ask for it.
        """
        if self.override and item.timeout_us and (item.timeout_us < self.timeout_us or not self.timeout_us):
            return item.timeout_us
        return self.timeout_us


class PriorityQueue(Generic[W]):
    """Levels by priority, 1 the highest; without priorities there is one. Made after Triton's queue policies."""

    def __init__(
        self,
        policy: ModelQueuePolicy,
        priority_levels: int = 0,
        default_level: int = 0,
        level_policies: Mapping[int, ModelQueuePolicy] | None = None,
    ) -> None:
        self._policy = policy
        self._priority_levels = priority_levels
        self._default_level = default_level
        self._level_policies = level_policies or {}
        # Levels are made when they are used: a configuration may name 2**64 of them.
        self._levels: dict[int, Level] = {}
        self._order: list[int] = []
        self._expiries: list[tuple[int, int, W]] = []
        self._numbers = count()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[W]:
        """In the order of execution."""
        for priority in self._order:
            level = self._levels[priority]
            yield from level.waiting  # type: ignore[misc]
            if level.delayed:
                yield from level.delayed  # type: ignore[misc]

    def push(self, item: W, now_ns: int) -> None:
        """Raises QueueFullError when the level of the request is full."""
        level = self._level(item.priority)
        if level.max_size and len(level.waiting) + len(level.delayed) >= level.max_size:
            raise QueueFullError("Exceeds maximum queue size")
        level.waiting[item] = None
        item.level = level
        item.arrived_ns = now_ns
        self._size += 1
        timeout_us = level.timeout_of(item) if level.timeout_us or level.override else 0
        item.expires_ns = now_ns + timeout_us * 1000 if timeout_us else 0
        self._note_expiry(item)

    def remove(self, item: W) -> bool:
        """Takes it out; False when it does not wait."""
        level = item.level
        if level is None:
            return False
        if item in level.waiting:
            del level.waiting[item]
        else:
            del level.delayed[item]
        item.level = None
        self._size -= 1
        # What has left must not be kept alive by the heap, nor make it grow without end.
        if len(self._expiries) > 2 * self._size:
            self._expiries = [entry for entry in self._expiries if entry[2].level is not None]
            heapq.heapify(self._expiries)
        return True

    def next_expiry(self) -> int | None:
        """When `expire` will find something."""
        expiries = self._expiries
        while expiries and expiries[0][2].level is None:
            heapq.heappop(expiries)
        return expiries[0][0] if expiries else None

    def expire(self, now_ns: int) -> list[tuple[W, PenstockError]]:
        """Applies policies and deadlines: what has to end comes back with its error and waits no longer."""
        ended: list[tuple[W, PenstockError]] = []
        while (when := self.next_expiry()) is not None and when <= now_ns:
            item = heapq.heappop(self._expiries)[2]
            level = item.level
            if level is None:
                continue
            if item.deadline_ns and item.deadline_ns <= now_ns:
                self.remove(item)
                ended.append((item, DeadlineExceededError(DEADLINE_TEXT)))
            elif level.delays:
                del level.waiting[item]
                level.delayed[item] = None
                item.expires_ns = 0
                self._note_expiry(item)
            else:
                self.remove(item)
                ended.append((item, QueueTimeoutError("Request timeout expired")))
        return ended

    def _note_expiry(self, item: W) -> None:
        when = item.expires_ns
        if item.deadline_ns and (not when or item.deadline_ns < when):
            when = item.deadline_ns
        if when:
            heapq.heappush(self._expiries, (when, next(self._numbers), item))

    def _level(self, priority: int) -> Level:
        if not self._priority_levels:
            priority = 0
        elif not 1 <= priority <= self._priority_levels:
            # As in Triton, a priority that the model does not have is the default one.
            priority = self._default_level
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = Level(priority, self._level_policies.get(priority, self._policy))
            insort(self._order, priority)
        return level


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
