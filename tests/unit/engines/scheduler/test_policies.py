"""Order among requests: first come first served, priority with ageing, and shares between tenants."""

from __future__ import annotations

import pytest

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.scheduler.fair_queue import INPUT_WEIGHT, OUTPUT_WEIGHT, BackgroundLast, FairQueue
from penstock.engines.scheduler.queues import Policy
from penstock.engines.scheduler.request import Request
from unit.engines.scheduler.harness import Rig, make_rig


def first_steps(rig: Rig) -> list[int]:
    """Ids in the order in which the runner met them."""
    seen: dict[int, None] = {}
    for step in rig.runner.steps:
        seen.update((new.id, None) for new in step.new_requests)
    return list(seen)


def fair_queue(rig: Rig) -> FairQueue:
    queues = rig.scheduler.intake.waiting
    assert isinstance(queues, BackgroundLast)
    assert isinstance(queues.foreground, FairQueue)
    return queues.foreground


def test_first_come_first_served_goes_by_arrival_not_by_message() -> None:
    rig = make_rig(max_num_seqs=1)
    now = rig.clock.now
    rig.run(*(rig.request([0], max_tokens=1, arrival_time=now - waited) for waited in (1, 3, 2)))
    assert first_steps(rig) == [2, 3, 1]


def test_lower_priorities_run_earlier() -> None:
    rig = make_rig(max_num_seqs=1, policy=Policy.PRIORITY)
    rig.run(*(rig.request([0], max_tokens=1, priority=priority) for priority in (1, -1, 0, 0)))
    assert first_steps(rig) == [2, 3, 4, 1]


def test_waiting_is_worth_a_level_of_priority() -> None:
    rig = make_rig(max_num_seqs=1, policy=Policy.PRIORITY, ageing_seconds=10.0)
    rig.step(rig.request([0], max_tokens=5))
    rig.step(rig.request([0], max_tokens=1, priority=2))
    rig.clock.now += 19  # two levels are worth twenty seconds
    rig.step(rig.request([0], max_tokens=1, priority=0))
    rig.clock.now += 2
    rig.step(rig.request([0], max_tokens=1, priority=0))
    rig.run()
    assert first_steps(rig) == [1, 3, 2, 4]


@pytest.mark.parametrize("ageing", [1.0, 10.0])
def test_no_flood_of_urgent_requests_starves_the_others(ageing: float) -> None:
    rig = make_rig(max_num_seqs=1, policy=Policy.PRIORITY, ageing_seconds=ageing)
    rig.step(rig.request([0], max_tokens=1), rig.request([0], max_tokens=1, priority=3))
    waited = 0
    while 2 not in rig.ended:
        rig.clock.now += 1.0
        rig.step(rig.request([0], max_tokens=1, priority=0), rig.request([0], max_tokens=1, priority=0))
        waited += 1
        assert waited <= 2 * 3 * ageing + 3, "those that came within three levels' worth of waiting, and no more"
    assert waited >= 3 * ageing, "it does wait"


def test_who_goes_before_the_one_that_finds_no_blocks_is_admitted() -> None:
    rig = make_rig(4, 16, policy=Policy.PRIORITY)
    rig.step(rig.request([0], max_tokens=9))
    rig.step(rig.request([1] * 40, max_tokens=1))
    assert set(rig.counts()) == {1}
    rig.step(rig.request([2], max_tokens=1, priority=-1))
    assert set(rig.counts()) == {1, 3}
    rig.run()


# -- fair ------------------------------------------------------------------------------------------------------


def test_tenants_take_turns() -> None:
    rig = make_rig(max_num_seqs=1, policy=Policy.FAIR)
    many = [rig.request([0], max_tokens=2, tenant="many") for _ in range(4)]
    rig.run(*many, rig.request([0], max_tokens=2, tenant="few"))
    assert first_steps(rig).index(5) <= 1


def test_shares_are_counted_in_weighted_tokens_each_once() -> None:
    rig = make_rig(max_num_seqs=1, policy=Policy.FAIR)
    rig.run(rig.request(range(10), max_tokens=5, tenant="a"))
    # the last token is sampled, but never computed
    assert fair_queue(rig).counter("a") == 10 * INPUT_WEIGHT + 4 * OUTPUT_WEIGHT
    rig.run(rig.request(range(10), max_tokens=1, tenant="b"))
    assert fair_queue(rig).counter("b") - fair_queue(rig).counter("a") <= 2 * INPUT_WEIGHT, "hits are free"


def test_samples_pay_for_their_prompt_once() -> None:
    rig = make_rig(32, policy=Policy.FAIR, enable_prefix_caching=False)
    rig.run(rig.request(range(10), n=3, max_tokens=3, tenant="a"))
    # after the fork each follower computes the prompt's last token again, for which nobody is charged
    assert fair_queue(rig).counter("a") == 10 * INPUT_WEIGHT + 3 * 2 * OUTPUT_WEIGHT


def test_recomputation_after_a_preemption_is_free() -> None:
    rig = make_rig(4, 2, max_num_seqs=2, policy=Policy.FAIR, enable_prefix_caching=False)
    rig.run(rig.request([0, 1], max_tokens=5, tenant="a"), rig.request([1, 0, 1], max_tokens=4, tenant="b"))
    assert rig.scheduler.stats().preemptions
    assert fair_queue(rig).counter("a") == 2 * INPUT_WEIGHT + 4 * OUTPUT_WEIGHT
    assert fair_queue(rig).counter("b") == 3 * INPUT_WEIGHT + 3 * OUTPUT_WEIGHT


def test_prompts_are_charged_when_they_are_admitted() -> None:
    """Before their first token: a tenant whose long prompts run at the same time does not look as if it had nothing."""
    rig = make_rig(64, max_num_seqs=4, max_num_batched_tokens=8, policy=Policy.FAIR)
    rig.step(rig.request([5] * 40, tenant="a"))
    assert fair_queue(rig).counter("a") == 40 * INPUT_WEIGHT
    rig.run()
    assert fair_queue(rig).counter("a") == 40 * INPUT_WEIGHT + 3 * OUTPUT_WEIGHT, "and not a second time"


def test_nobody_saves_up_shares_while_idle() -> None:
    rig = make_rig(32, max_num_seqs=1, policy=Policy.FAIR)
    rig.run(*(rig.request([0, 1], max_tokens=20, tenant="busy") for _ in range(5)))
    rig.step(*(rig.request([0, 1], max_tokens=20, tenant="busy") for _ in range(5)))
    served = fair_queue(rig).counter("busy")
    rig.step(*(rig.request([1, 0], max_tokens=20, tenant="back") for _ in range(5)))
    assert fair_queue(rig).counter("back") >= served - 20 * OUTPUT_WEIGHT
    rig.run()
    order = first_steps(rig)[6:]
    assert {request_id > 10 for request_id in order[:2]} == {True, False}, "they take turns from now on"


@pytest.mark.parametrize("seats", [1, 3])
@pytest.mark.parametrize(("long_prompt", "long_output"), [(2, 24), (30, 2), (16, 8)])
def test_two_backlogged_tenants_stay_within_the_bound(seats: int, long_prompt: int, long_output: int) -> None:
    """Theorem 4.4 of Sheng et al.: never more than 2 * max(input weight * longest prompt, output weight * tokens that
    run at once) apart, however different their requests are."""
    rig = make_rig(64, 4, max_num_seqs=seats, policy=Policy.FAIR, max_queued_requests=1000, vocab_size=1 << 30)
    large = [rig.request([9, i, *range(long_prompt - 2)], max_tokens=long_output, tenant="large") for i in range(40)]
    small = [rig.request([8, i], max_tokens=2, tenant="small") for i in range(300)]
    rig.step(*large, *small)
    queue = fair_queue(rig)
    bound = 2 * max(INPUT_WEIGHT * long_prompt, OUTPUT_WEIGHT * seats * (long_prompt + long_output))
    apart = 0.0
    while {request.tenant for request in queue} == {"large", "small"}:
        rig.step()
        apart = max(apart, abs(queue.counter("large") - queue.counter("small")))
    assert 0 < apart <= bound
    assert queue.counter("small") > 3 * bound, "long enough to tell"


def test_tenants_names_do_not_pile_up() -> None:
    rig = make_rig(max_num_seqs=1, policy=Policy.FAIR)
    for index in range(4000):
        rig.run(rig.request([0], max_tokens=1, tenant=f"tenant {index}"))
    assert len(fair_queue(rig)._counters) < 2500
    assert len(fair_queue(rig)._backlogged) < 2500
    assert fair_queue(rig)._queues == {}


def test_a_tenant_that_leaves_and_returns_is_in_line_once() -> None:
    queue, rig = FairQueue(), make_rig()
    for index in range(50):
        request = Request(index, rig.request([0], tenant="a"), 0, frozenset())
        queue.push(request)
        queue.remove(request)
    assert len(queue._backlogged) == 1
    assert queue.peek() is None


# -- shares of a step ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("depth", [1, 2])
def test_short_prompts_behind_a_long_one_get_their_first_token_soon(policy: Policy, depth: int) -> None:
    rig = make_rig(
        1000, 16, max_num_batched_tokens=64, policy=policy, steps_in_flight=depth, max_num_seqs=16, vocab_size=1 << 30
    )
    long = rig.request([5] * 960, max_tokens=8, tenant="long")
    rig.step(long)
    short = [rig.request([6, i] * 10, max_tokens=20, tenant="short") for i in range(6)]
    rig.step(*short)
    for _ in range(3 + depth):
        rig.step()
    assert all(rig.tokens.get(request.ids[0]) for request in short), "half of each step is theirs"
    assert not rig.tokens.get(1)
    rig.run()
    assert len(rig.tokens[1]) == 8


@pytest.mark.parametrize("policy", Policy)
def test_short_prompts_behind_several_long_ones_get_their_first_token_soon(policy: Policy) -> None:
    rig = make_rig(
        1000, 16, max_num_batched_tokens=256, policy=policy, max_num_seqs=16, vocab_size=1 << 30, max_queued_tokens=9999
    )
    long = [rig.request([5, i] * 450, max_tokens=8, tenant="long") for i in range(4)]
    rig.step(*long)
    short = [rig.request([6, i] * 10, max_tokens=20, tenant="short") for i in range(6)]
    rig.step(*short)
    for _ in range(7):
        rig.step()
    assert all(rig.tokens.get(request.ids[0]) for request in short), "the long ones have got seats, and share"
    rig.run()
    assert all(len(rig.tokens[request.ids[0]]) == 8 for request in long)


def test_half_of_a_step_goes_by_order_and_half_to_the_nearest_end() -> None:
    rig = make_rig(200, max_num_seqs=4, max_num_batched_tokens=40, enable_prefix_caching=False)
    rig.step(rig.request([1] * 300))
    rig.step(rig.request([2] * 200))
    assert rig.counts() == {1: 20, 2: 20}
    rig.step(rig.request([3] * 30))
    assert rig.counts() == {1: 20, 3: 20}, "what is longer than the newcomer leaves it half of the step"
    rig.step()
    assert rig.counts() == {1: 20, 2: 10, 3: 10}
    rig.step()
    assert rig.counts() == {1: 20, 2: 19, 3: 1}


def test_some_of_a_step_is_kept_for_a_head_that_is_longer_than_those_who_run() -> None:
    rig = make_rig(200, max_num_seqs=4, max_num_batched_tokens=40, enable_prefix_caching=False)
    rig.step(rig.request([1] * 100))
    rig.step(rig.request([2] * 200))
    assert rig.counts() == {1: 20, 2: 20}


def test_what_nobody_else_can_use_goes_to_the_prompts_of_the_step() -> None:
    rig = make_rig(200, max_num_seqs=4, max_num_batched_tokens=40)
    rig.step(rig.request([1] * 300))
    rig.step(rig.request([2] * 3))
    assert rig.counts() == {1: 37, 2: 3}


# -- preemption ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("seats", [2, 4, 8])
def test_competing_for_too_few_blocks_does_not_livelock(policy: Policy, seats: int) -> None:
    """Eight requests of which each wants the whole pool: all of them end, and none is thrown out again and again."""
    rig = make_rig(8, 2, max_num_seqs=seats, policy=policy, max_queued_requests=100, vocab_size=1 << 30)
    requests = [
        rig.request([index, index], max_tokens=14, tenant=str(index % 3), priority=index % 2) for index in range(8)
    ]
    worst: dict[int, int] = {}
    rig.step(*requests)
    steps = 1
    while rig.core.has_work:
        worst |= {r.id: r.num_preemptions for r in rig.scheduler.intake.requests.values()}
        rig.step()
        steps += 1
    assert max(worst.values()) >= 1, "the pool is too small for this to happen without"
    # what must stay free at an admission doubles with each preemption: 1, 2, 4, then all of the 8 blocks
    assert max(worst.values()) <= 3
    # one at a time they would take 8 * 14 steps
    assert steps <= 2 * 8 * 14


def test_the_first_in_order_is_never_preempted() -> None:
    rig = make_rig(8, 2, max_num_seqs=8, vocab_size=1 << 30)
    rig.step(*(rig.request([index], max_tokens=15) for index in range(6)))
    while rig.core.has_work:
        for first in rig.scheduler.running.runs[:1]:
            computed, preemptions = first.num_computed_tokens, first.request.num_preemptions
            rig.step()
            assert first.request.num_preemptions == preemptions
            assert first.num_computed_tokens > computed
        if not rig.scheduler.running.runs:
            rig.step()
    assert rig.scheduler.stats().preemptions


def test_preempted_requests_go_before_those_that_came_later() -> None:
    rig = make_rig(4, 2, max_num_seqs=3, vocab_size=1 << 30)
    rig.step(rig.request([0, 1], max_tokens=5), rig.request([1, 0, 1], max_tokens=4))
    while not rig.scheduler.stats().preemptions:
        rig.step()
    rig.step(rig.request([3], params=SamplingParams(max_tokens=1)))
    rig.run()
    order = [new.id for step in rig.runner.steps for new in step.new_requests]
    assert order == [1, 2, 2, 3]


@pytest.mark.parametrize("num_shortages", range(6))
def test_what_must_stay_free_doubles_with_each_shortage(num_shortages: int) -> None:
    rig = make_rig(16, 4, max_num_seqs=4)
    rig.step(rig.request([0], max_tokens=4))
    rig.scheduler.add(rig.request([1]))
    rig.scheduler.intake.requests[2].num_shortages = num_shortages
    rig.step()
    # of 16 blocks one is taken and one is wanted
    assert (2 in rig.last.request_ids) == (2**num_shortages <= 14)
    rig.run()
    assert len(rig.tokens[2]) == 4, "at the latest when nobody else runs"


def test_a_step_that_preempts_admits_nobody() -> None:
    rig = make_rig(8, 2, max_num_seqs=3, policy=Policy.PRIORITY, vocab_size=1 << 30)
    rig.step(rig.request([0, 1], max_tokens=13), rig.request([1] * 9, max_tokens=4))
    rig.step(rig.request([7] * 6, max_tokens=1, priority=-1))
    assert rig.last.new_requests == [], "it needs three blocks"
    while not rig.scheduler.stats().preemptions:
        rig.step()
    assert rig.scheduler.stats().num_free_blocks >= 3
    assert rig.last.new_requests == [], "blocks are free now, for those who run first"
    rig.step()
    assert [new.id for new in rig.last.new_requests] == [3]
