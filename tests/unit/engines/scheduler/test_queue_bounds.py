"""What may wait, how long a refused caller is told to stay away, and what waiting costs."""

from __future__ import annotations

import sys
import tracemalloc

import pytest

from penstock.engines.contract.messages import RequestError, SamplingParams
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.step import ModelRunnerOutput
from penstock.engines.scheduler import admission
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.fair_queue import make_queue
from penstock.engines.scheduler.intake import _Deadlines
from penstock.engines.scheduler.queues import KeyedQueue, Policy
from penstock.engines.scheduler.request import Request
from penstock.engines.scheduler.scheduler import Scheduler
from penstock.kvcache import KVGroup
from penstock.kvcache.prefixes import ComputedBlock
from unit.engines.scheduler.harness import Rig, alone, make_rig

INFO = ModelInfo(
    vocab_size=1000, max_model_len=100, kv_groups=(KVGroup(4),), num_blocks=64, eos_token_ids=(), runner="none"
)


def refused(rig: Rig) -> dict[int, RequestError]:
    return {
        request_id: output.error
        for request_id, output in rig.ended.items()
        if output.error is not None and output.error.code == "queue_full"
    }


def test_free_seats_are_no_queue() -> None:
    rig = make_rig(max_num_seqs=3, max_queued_requests=0)
    rig.step(*(rig.request([0], max_tokens=9) for _ in range(4)))
    assert list(refused(rig)) == [4]
    assert rig.last.request_ids == [1, 2, 3]
    rig.step(rig.request([0]))
    assert list(refused(rig)) == [4, 5], "no seat is free, and nobody may wait"


def test_the_queue_is_bounded_in_requests() -> None:
    rig = make_rig(max_num_seqs=2, max_queued_requests=3)
    rig.step(*(rig.request([0], max_tokens=9) for _ in range(8)))
    assert sorted(refused(rig)) == [6, 7, 8]
    assert rig.scheduler.num_waiting == 3


def test_all_samples_count() -> None:
    rig = make_rig(max_num_seqs=1, max_queued_requests=3)
    rig.step(rig.request([0], max_tokens=9))
    rig.step(rig.request([1], n=4), rig.request([1], n=3))
    assert sorted(refused(rig)) == [2, 3, 4, 5]
    assert rig.scheduler.num_waiting == 3


def test_more_samples_than_the_queue_holds_are_taken_by_an_idle_engine() -> None:
    rig = make_rig(32, max_num_seqs=2, max_queued_requests=1)
    rig.run(rig.request([0], n=6))
    assert not refused(rig)
    assert len(rig.ended) == 6


def test_the_queue_is_bounded_in_tokens() -> None:
    rig = make_rig(max_num_seqs=1, max_queued_tokens=10)
    rig.step(rig.request([0], max_tokens=9))
    rig.step(rig.request([0] * 6), rig.request([0] * 5), rig.request([0] * 4))
    assert list(refused(rig)) == [3]
    assert rig.scheduler.intake.num_waiting_tokens == 10


def test_a_single_prompt_may_wait_however_long_it_is() -> None:
    rig = make_rig(max_num_seqs=1, max_queued_tokens=10)
    rig.step(rig.request([0], max_tokens=9))
    rig.step(rig.request([0] * 30))
    assert not refused(rig)


def test_room_in_the_queue_comes_back() -> None:
    rig = make_rig(max_num_seqs=1, max_queued_requests=1, max_queued_tokens=8)
    rig.step(rig.request([0], max_tokens=9))
    for request_id in range(2, 6):
        rig.step(rig.request([0] * 8))
        assert rig.scheduler.intake.num_waiting_tokens == 8
        rig.step(rig.abort(request_id))
        assert (rig.scheduler.num_waiting, rig.scheduler.intake.num_waiting_tokens) == (0, 0)
    assert not refused(rig)


def test_samples_left_by_their_leader_wait_with_their_prompt() -> None:
    rig = make_rig(max_num_seqs=1)
    rig.step(rig.request([0], max_tokens=9))
    rig.step(rig.request([0] * 8, n=3))
    assert (rig.scheduler.num_waiting, rig.scheduler.intake.num_waiting_tokens) == (3, 8)
    rig.step(rig.abort(2))
    assert (rig.scheduler.num_waiting, rig.scheduler.intake.num_waiting_tokens) == (2, 8)


def serve_one_a_second(rig: Rig, count: int) -> None:
    rig.step(*(rig.request([0], max_tokens=1) for _ in range(count)))
    for _ in range(count):
        rig.clock.now += 1.0
        rig.step()


def test_retry_after_is_about_as_long_as_the_queue_takes() -> None:
    rig = make_rig(max_num_seqs=1, max_queued_requests=100)
    serve_one_a_second(rig, 80)
    rig.step(*(rig.request([0], max_tokens=1) for _ in range(20)))
    rig.step(*(rig.request([0], max_tokens=1) for _ in range(100)))
    waits = [error.retry_after for error in refused(rig).values()]
    assert waits
    assert waits == pytest.approx([60] * len(waits), rel=0.01), "a hundred seconds, told as at most one minute"


def test_an_idle_night_does_not_make_retry_after_longer() -> None:
    rig = make_rig(max_num_seqs=1, max_queued_requests=10)
    serve_one_a_second(rig, 11)
    rig.run()
    rig.clock.now += 8 * 3600
    rig.step(*(rig.request([0], max_tokens=1) for _ in range(11)))
    rig.step(*(rig.request([0], max_tokens=1) for _ in range(3)))
    waits = [error.retry_after for error in refused(rig).values()]
    assert waits
    assert all(wait is not None and 1 <= wait <= 11 for wait in waits)


# -- cost ------------------------------------------------------------------------------------------------------


def test_samples_that_wait_share_their_prompt() -> None:
    rig = make_rig(512, max_num_seqs=1, max_num_batched_tokens=1000)
    request = rig.request([1] * 900, n=500, max_tokens=2)
    tracemalloc.start()
    try:
        rig.scheduler.add(request)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert rig.scheduler.num_waiting == 500
    assert size < 500 * sys.getsizeof(request.prompt_token_ids) / 2


def test_samples_leave_the_callers_prompt_alone() -> None:
    rig = make_rig(64, max_num_seqs=2)
    requests = [rig.request([1, 2, 3], n=3), rig.request([4])]
    rig.run(*requests)
    assert [request.prompt_token_ids for request in requests] == [[1, 2, 3], [4]]
    assert [rig.tokens[i] for i in (1, 2, 3)] == [alone([1, 2, 3], requests[0].params)[0]] * 3


class CountedKey(tuple[float, int]):
    """A request's key that counts how often it is compared: what ordering a queue costs."""

    comparisons = 0
    __slots__ = ()

    def __lt__(self, other: object) -> bool:
        CountedKey.comparisons += 1
        return tuple.__lt__(self, other)  # type: ignore[operator]


@pytest.mark.parametrize("policy", Policy)
def test_a_step_costs_the_same_however_many_wait(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    def cost(num_waiting: int) -> int:
        config = SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=8, policy=policy, max_queued_requests=num_waiting
        )
        scheduler = Scheduler(config, INFO)
        rig = make_rig()
        for index in range(4 + num_waiting):
            scheduler.add(rig.request([index % 7], max_tokens=50, tenant=str(index % 5)))

        def step() -> None:
            scheduler.update_from_output(ModelRunnerOutput([[1]] * len(scheduler.schedule(0.0).request_ids)), 0.0)

        for _ in range(3):
            step()
        touched = 0

        def count(self: Request, name: str) -> object:
            nonlocal touched
            touched += 1
            return object.__getattribute__(self, name)

        with monkeypatch.context() as patch:
            patch.setattr(Request, "__getattribute__", count)
            for _ in range(5):
                step()
        assert len(scheduler.intake.waiting) == num_waiting
        return touched

    assert cost(1000) == cost(10)


def test_a_step_looks_at_so_many_tokens_of_those_that_it_passes_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand twins of one long prompt: each step passes by some of them, and asks once what they wait for."""
    monkeypatch.setattr(admission, "_MOST_LOOKED_AT", 2000)
    rig = make_rig(64, max_num_seqs=4, max_num_batched_tokens=8, max_queued_requests=1000)
    rig.step(rig.request([5] * 100), *(rig.request([5] * 100, max_tokens=1) for _ in range(1000)))
    intake = rig.scheduler.intake
    for count in (20, 40, 60):
        rig.step()
        assert len(intake.waiting) == 1000 - count
    assert rig.scheduler.num_waiting == 1000
    asked = 0

    def counted(self: ComputedBlock) -> bool:
        nonlocal asked
        asked += 1
        return self.tables is not None

    monkeypatch.setattr(ComputedBlock, "is_pending", property(counted))
    intake.requeue_unblocked()
    assert asked == 1
    rig.run()
    assert len(rig.ended) == 1001


def test_taking_the_next_one_out_costs_a_logarithm() -> None:
    queue, rig = KeyedQueue(), make_rig()
    for index in range(1000):
        message = rig.request([0])
        request = Request(index, message, 0, frozenset())
        request.key = CountedKey((float(index * 7919 % 1000), index))
        queue.push(request)
    CountedKey.comparisons = 0
    for _ in range(10):
        queue.pop()
    assert CountedKey.comparisons <= 10 * 2 * 10


@pytest.mark.parametrize("policy", Policy)
def test_removed_requests_are_skipped_and_forgotten(policy: Policy) -> None:
    queue, rig = make_queue(policy), make_rig()
    requests = [Request(i, rig.request([0], tenant=str(i % 3)), 0, frozenset()) for i in range(100)]
    for request in requests:
        queue.push(request)
    for request in requests[:97]:
        queue.remove(request)
    assert {request.id for request in queue} == {97, 98, 99}
    assert len(queue) == 3
    assert {queue.pop().id for _ in range(3)} == {97, 98, 99}
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()


def test_a_queue_does_not_keep_what_was_removed() -> None:
    queue, rig = KeyedQueue(), make_rig()
    for index in range(1000):
        request = Request(index, rig.request([0], params=SamplingParams(max_tokens=1)), 0, frozenset())
        queue.push(request)
        if index:
            queue.remove(request)
    assert len(queue._heap) <= 2 * len(queue) + 17


def test_deadlines_are_due_in_order_and_once() -> None:
    deadlines = _Deadlines(lambda _: True)
    for request_id, deadline in ((1, 3.0), (2, 1.0), (3, 2.0)):
        deadlines.add(deadline, request_id)
    assert deadlines.due(0.5) == []
    assert deadlines.due(2.0) == [2, 3]
    assert deadlines.due(2.0) == []
    assert deadlines.due(9.0) == [1]


def test_compacting_keeps_every_live_deadline() -> None:
    live = set(range(0, 3000, 100))
    deadlines = _Deadlines(live.__contains__)
    for request_id in range(3000):
        deadlines.add(float(request_id), request_id)
    assert live <= set(deadlines.due(1e9))
