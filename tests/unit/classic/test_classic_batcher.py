"""The queue and the dynamic batcher, without a clock: rules one by one, then a state machine over all of them."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from penstock.classic.batching.queue import DynamicBatcher, QueueEntry
from penstock.engines.errors import DeadlineExceededError, QueueFullError, QueueTimeoutError
from support.classic import ECHO, model_config

US = 1000


def batcher(dynamic: str = "", *, max_batch_size: int = 8) -> DynamicBatcher[QueueEntry]:
    config = model_config(ECHO, f"dynamic_batching {{ {dynamic} }}")
    config.max_batch_size = max_batch_size
    return DynamicBatcher(config)


def added(to: DynamicBatcher[QueueEntry], *sizes: int, now: int = 0, **fields: int) -> list[QueueEntry]:
    items = [QueueEntry(size, **fields) for size in sizes]
    for item in items:
        to.add(item, now)
    return items


def sizes(batch: list[QueueEntry]) -> list[int]:
    return [item.size for item in batch]


def test_batches_are_as_large_as_possible_and_go_at_once_by_default() -> None:
    of = batcher()
    added(of, 3, 3, 3, 1)
    assert [sizes(of.take(0)) for _ in range(3)] == [[3, 3], [3, 1], []]


def test_a_request_as_large_as_the_maximum_goes_alone() -> None:
    of = batcher()
    added(of, 8, 1, 8, 8)
    assert [sizes(of.take(0)) for _ in range(5)] == [[8], [1], [8], [8], []]


@pytest.mark.parametrize(
    ("waiting", "batches"),
    [
        ((1,) * 7, [4, 2, 1]),
        ((1,) * 9, [4, 4, 1]),
        ((3, 3), [1, 1]),  # 3 alone: with the next it would be larger than every preferred size
        ((1, 2, 1, 5), [3, 1]),
    ],
)
def test_preferred_sizes_are_formed_first(waiting: tuple[int, ...], batches: list[int]) -> None:
    of = batcher("preferred_batch_size: [ 2, 4 ]")
    added(of, *waiting)
    assert [len(batch) for batch in iter(lambda: of.take(0), [])] == batches


def test_a_batch_waits_for_more_until_its_oldest_request_has_waited_long_enough() -> None:
    of = batcher("max_queue_delay_microseconds: 100")
    added(of, 1, now=0)
    assert of.take(10 * US) == []
    assert of.delay_ends == 100 * US
    added(of, 1, now=50 * US)
    assert of.take(99 * US) == []
    assert sizes(of.take(100 * US)) == [1, 1]


def test_a_full_batch_does_not_wait() -> None:
    of = batcher("max_queue_delay_microseconds: 100")
    added(of, 5, 2, 3)
    assert sizes(of.take(0)) == [5, 2]
    assert of.take(0) == []


def test_after_the_delay_all_goes_that_fits_not_only_a_preferred_size() -> None:
    of = batcher("preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 100")
    added(of, 1, 1, 1)
    assert sizes(of.take(100 * US)) == [1, 1, 1]


def test_requests_of_other_shapes_end_a_batch() -> None:
    of = batcher("max_queue_delay_microseconds: 100")
    for shape in "aabba":
        item = QueueEntry()
        item.shapes = shape
        of.add(item, 0)
    assert [[item.shapes for item in of.take(0)] for _ in range(3)] == [["a", "a"], ["b", "b"], []]
    assert [item.shapes for item in of.take(100 * US)] == ["a"]


def test_the_bound_of_a_queue_holds_for_each_level() -> None:
    of = batcher("priority_levels: 2 default_priority_level: 2 default_queue_policy { max_queue_size: 1 }")
    added(of, 1, priority=1)
    added(of, 1, priority=2)
    for priority in (0, 1, 2, 3):
        with pytest.raises(QueueFullError, match="Exceeds maximum queue size"):
            added(of, 1, priority=priority)
    assert len(of) == 2


def test_levels_may_have_policies_of_their_own() -> None:
    of = batcher(
        """priority_levels: 2 default_priority_level: 2
        default_queue_policy { default_timeout_microseconds: 10 }
        priority_queue_policy { key: 1 value: { default_timeout_microseconds: 20 } }"""
    )
    [first] = added(of, 1, priority=1)
    [second] = added(of, 1, priority=2)
    assert of.next_expiry() == 10 * US
    assert [(item, type(error)) for item, error in of.expire(15 * US)] == [(second, QueueTimeoutError)]
    assert [item for item, _ in of.expire(20 * US)] == [first]


@pytest.mark.parametrize(
    ("policy", "timeout_us", "expires_us"),
    [
        ("default_timeout_microseconds: 50", 10, 50),
        ("default_timeout_microseconds: 50 allow_timeout_override: true", 10, 10),
        ("default_timeout_microseconds: 50 allow_timeout_override: true", 90, 50),
        ("default_timeout_microseconds: 50 allow_timeout_override: true", 0, 50),
        ("allow_timeout_override: true", 10, 10),
        ("", 10, None),
    ],
)
def test_callers_may_shorten_their_time_where_the_policy_says_so(
    policy: str, timeout_us: int, expires_us: int | None
) -> None:
    of = batcher(f"default_queue_policy {{ {policy} }}")
    added(of, 1, timeout_us=timeout_us)
    assert of.next_expiry() == (None if expires_us is None else expires_us * US)


def test_delayed_requests_go_after_all_others_of_their_level() -> None:
    of = batcher(
        """priority_levels: 2 default_priority_level: 1 preferred_batch_size: [ 1 ]
        default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 10 }"""
    )
    [late] = added(of, 1, now=0)
    [timely] = added(of, 1, now=5 * US)
    [lower] = added(of, 1, now=5 * US, priority=2)
    assert of.expire(10 * US) == []
    assert [of.take(10 * US) for _ in range(3)] == [[timely], [late], [lower]]


def test_a_delayed_request_still_has_its_deadline() -> None:
    of = batcher("default_queue_policy { timeout_action: DELAY default_timeout_microseconds: 10 }")
    [item] = added(of, 1, deadline_ns=30 * US)
    assert of.expire(10 * US) == []
    assert of.next_expiry() == 30 * US
    assert [(found, type(error)) for found, error in of.expire(30 * US)] == [(item, DeadlineExceededError)]


def test_models_without_a_batcher_execute_in_order_whatever_the_priority() -> None:
    of: DynamicBatcher[QueueEntry] = DynamicBatcher(model_config(ECHO))
    items = added(of, 2, priority=3) + added(of, 1, priority=1)
    assert [of.take(0) for _ in range(3)] == [[items[0]], [items[1]], []]


class Queueing(RuleBasedStateMachine):
    """Whatever is done to it: nothing is lost or comes twice, bounds and times hold, priorities go first."""

    items = Bundle("items")

    @initialize(
        preferred=st.sets(st.integers(1, 8), max_size=2),
        delay=st.sampled_from([0, 0, 50, 500]),
        levels=st.sampled_from([0, 3]),
        max_queue_size=st.sampled_from([0, 3]),
        timeout=st.sampled_from([0, 40]),
        action=st.sampled_from(["REJECT", "DELAY"]),
    )
    def start(
        self, preferred: set[int], delay: int, levels: int, max_queue_size: int, timeout: int, action: str
    ) -> None:
        self.of = batcher(
            f"""preferred_batch_size: {sorted(preferred)} max_queue_delay_microseconds: {delay}
            priority_levels: {levels} default_priority_level: {min(levels, 2)}
            default_queue_policy {{ max_queue_size: {max_queue_size} timeout_action: {action}
            default_timeout_microseconds: {timeout} allow_timeout_override: true }}"""
        )
        self.preferred = preferred or {8}
        self.delay, self.levels, self.max_queue_size = delay * US, levels, max_queue_size
        self.rejects = action == "REJECT"
        self.now = 0
        self.waiting: set[QueueEntry] = set()

    def level(self, item: QueueEntry) -> int:
        return (item.priority if 1 <= item.priority <= 3 else 2) if self.levels else 0

    @rule(
        target=items,
        size=st.integers(1, 8),
        priority=st.integers(0, 4),
        timeout_us=st.sampled_from([0, 0, 10, 1000]),
        deadline=st.sampled_from([0, 0, 60]),
        shape=st.sampled_from("aaab"),
    )
    def add(self, size: int, priority: int, timeout_us: int, deadline: int, shape: str) -> QueueEntry:
        item = QueueEntry(size, priority, timeout_us, self.now + deadline * US if deadline else 0)
        item.shapes = shape
        mates = sum(self.level(other) == self.level(item) for other in self.waiting)
        try:
            self.of.add(item, self.now)
        except QueueFullError:
            assert self.max_queue_size
            assert mates == self.max_queue_size
        else:
            assert not self.max_queue_size or mates < self.max_queue_size
            self.waiting.add(item)
        return item

    @rule(item=consumes(items))
    def cancel(self, item: QueueEntry) -> None:
        assert self.of.remove(item) == (item in self.waiting)
        self.waiting.discard(item)

    @rule(microseconds=st.integers(1, 60))
    def wait(self, microseconds: int) -> None:
        self.now += microseconds * US
        for item, error in self.of.expire(self.now):
            assert item in self.waiting
            self.waiting.remove(item)
            if isinstance(error, DeadlineExceededError):
                assert 0 < item.deadline_ns <= self.now
            else:
                assert self.rejects
                assert 0 < item.expires_ns <= self.now

    @precondition(lambda self: self.waiting)
    @rule()
    def take(self) -> None:
        batch = self.of.take(self.now)
        if not batch:
            # Nothing goes only while a batch may still grow, and not for longer than the delay.
            assert sum(item.size for item in self.waiting) < max(self.preferred)
            assert min(item.arrived_ns for item in self.waiting) + self.delay > self.now
            assert self.now < self.of.delay_ends <= self.now + self.delay
            return
        assert set(batch) <= self.waiting
        assert len(set(batch)) == len(batch)
        assert sum(item.size for item in batch) <= 8
        assert len({item.shapes for item in batch}) == 1
        self.waiting -= set(batch)
        levels = [self.level(item) for item in batch]
        assert levels == sorted(levels)
        assert not self.waiting or max(levels) <= min(self.level(item) for item in self.waiting)

    @invariant()
    def books(self) -> None:
        if not hasattr(self, "of"):
            return
        assert len(self.of) == len(self.waiting)
        assert set(self.of.queue) == self.waiting
        assert len(self.of.queue._expiries) <= 2 * len(self.waiting)
        expiry = self.of.next_expiry()
        times = [time for item in self.waiting for time in (item.expires_ns, item.deadline_ns) if time]
        assert expiry == min(times, default=None)


TestQueueing = Queueing.TestCase
TestQueueing.settings = settings(max_examples=60, stateful_step_count=40)
