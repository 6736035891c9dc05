"""Who waits in front of an engine that schedules by itself, in which order, and who may not."""

from __future__ import annotations

import pytest

from penstock.engines.contract.messages import FinishReason, SamplingParams
from penstock.engines.scheduler.queues import Policy
from unit.engines.autonomous.rig import AutonomousRig, make_rig
from unit.engines.scheduler.harness import alone


def codes(rig: AutonomousRig) -> dict[int, str]:
    return {i: output.error.code for i, output in rig.ended.items() if output.error is not None}


def test_requests_get_what_they_would_get_alone() -> None:
    rig = make_rig(max_num_seqs=3)
    requests = [rig.request([i, 1, i + 1], max_tokens=3 + i) for i in range(7)]
    rig.run(*requests)
    for request in requests:
        tokens, reason, _ = alone(request.prompt_token_ids, request.params)
        assert rig.tokens[request.ids[0]] == tokens
        assert rig.ended[request.ids[0]].finish_reason is reason


def test_samples_are_requests_of_their_own_with_seeds_in_a_row() -> None:
    rig = make_rig(max_num_seqs=2)
    rig.run(rig.request([1, 2], n=4, params=SamplingParams(max_tokens=3, seed=10, temperature=0)), rig.request([1]))
    assert [(request.id, request.seed) for request in rig.batcher.started] == [
        (1, 10),
        (2, 11),
        (3, 12),
        (4, 13),
        (5, None),
    ]
    assert [rig.tokens[i] for i in (1, 2, 3, 4)] == [rig.tokens[1]] * 4


def test_what_the_engine_is_told_of_a_request() -> None:
    rig = make_rig()
    rig.step(rig.request([5, 6], priority=3, salt="s", adapter="a:1", max_tokens=9))
    [told] = rig.batcher.started
    assert (told.prompt_token_ids, told.priority, told.cache_salt, told.adapter) == ([5, 6], 3, "s", "a:1")
    assert told.params.max_tokens == 9


@pytest.mark.parametrize(
    ("policy", "order"), [(Policy.FCFS, [1, 2, 3, 4]), (Policy.PRIORITY, [1, 4, 2, 3]), (Policy.FAIR, [1, 3, 2, 4])]
)
def test_those_that_wait_go_in_the_order_of_the_policy(policy: Policy, order: list[int]) -> None:
    rig = make_rig(max_num_seqs=1, policy=policy, ageing_seconds=100.0)
    rig.step(rig.request([0], tenant="a", max_tokens=8))
    waiting = [
        rig.request([1], tenant="a", priority=1),
        rig.request([1], tenant="b", priority=1, max_tokens=20),
        rig.request([1], tenant="a", priority=0),
    ]
    rig.run(*waiting)
    assert rig.started() == order


def test_waiting_is_worth_priority() -> None:
    rig = make_rig(max_num_seqs=1, policy=Policy.PRIORITY, ageing_seconds=10.0)
    rig.step(rig.request([0], max_tokens=8))
    rig.step(rig.request([1], priority=1))
    rig.clock.now += 11
    rig.run(rig.request([1], priority=0))
    assert rig.started() == [1, 2, 3]


def test_tenants_are_charged_for_what_was_served() -> None:
    rig = make_rig(max_num_seqs=1, policy=Policy.FAIR, max_queued_requests=100)
    large = [rig.request([1] * 8, tenant="large", max_tokens=8) for _ in range(10)]
    small = [rig.request([2], tenant="small", max_tokens=2) for _ in range(30)]
    rig.step(*large, *small)
    while len(rig.core.intake.waiting) and {r.tenant for r in rig.core.intake.waiting} == {"large", "small"}:
        rig.step()
    served = [request.prompt_token_ids[0] for request in rig.batcher.started]
    assert served.count(2) >= 3 * served.count(1) > 3


def test_tenants_are_charged_for_their_prompts_when_these_are_handed_over() -> None:
    rig = make_rig(max_num_seqs=1, policy=Policy.FAIR, budget=8)
    rig.step(rig.request([1] * 16, tenant="first", max_tokens=2))
    counter = rig.core.intake.waiting.foreground.counter  # type: ignore[attr-defined]
    assert counter("first") == 16
    rig.run()
    assert counter("first") == 16 + 2, "the newest token is not computed"


def test_free_seats_are_no_queue() -> None:
    rig = make_rig(max_num_seqs=3, max_queued_requests=0)
    rig.step(*(rig.request([0], max_tokens=9) for _ in range(4)))
    assert codes(rig) == {4: "queue_full"}
    rig.step(rig.request([0]))
    assert codes(rig) == {4: "queue_full", 5: "queue_full"}
    assert rig.ended[5].error is not None
    assert rig.ended[5].error.retry_after is not None


def test_the_queue_is_bounded_in_tokens_of_all_samples() -> None:
    rig = make_rig(max_num_seqs=1, max_queued_tokens=12)
    rig.step(rig.request([0], max_tokens=9))
    rig.step(rig.request([0] * 4, n=2), rig.request([0] * 5), rig.request([0] * 4))
    assert codes(rig) == {4: "queue_full"}
    assert rig.core.stats().num_waiting_tokens == 12
    rig.run()
    assert rig.core.stats().num_waiting_tokens == 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "code"),
    [
        (90, 11, "context_length_exceeded"),
        (30, 11, "context_length_exceeded"),
        (0, 1, "invalid_request"),
        (1, 0, "invalid_request"),
    ],
)
def test_what_can_never_fit_is_refused_at_once(prompt: int, max_tokens: int, code: str) -> None:
    rig = make_rig(num_blocks=10, block_size=4, max_model_len=100)
    rig.step(rig.request([1] * prompt, max_tokens=max_tokens))
    assert codes(rig) == {1: code}
    assert rig.started() == []


def test_ids_in_use_are_ignored_even_when_their_request_is_only_aborted() -> None:
    rig = make_rig(abort_after=3)
    request = rig.request([1], max_tokens=50)
    rig.step(request)
    rig.step(request)
    rig.step(rig.abort(1))
    rig.step(request)
    assert rig.started() == [1]
    assert rig.core.stats().admitted == 1


def test_queue_seconds_end_at_the_handing_over() -> None:
    rig = make_rig(max_num_seqs=1)
    rig.step(rig.request([1], max_tokens=3))
    rig.clock.now += 5
    outputs = rig.step(rig.request([2], max_tokens=3, arrival_time=rig.clock.now)).outputs
    rig.clock.now += 7
    while not any(output.id == 2 for output in outputs):
        outputs += rig.step().outputs
    prompts = {output.id: output.prompt for output in outputs if output.prompt is not None}
    assert prompts[2].queue_seconds == 7


def test_statistics_at_idle() -> None:
    rig = make_rig(max_num_seqs=4)
    rig.run(rig.request([1] * 9, max_tokens=4))
    rig.run(rig.request([1] * 9, max_tokens=4), rig.request([1] * 2000))
    stats = rig.core.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)
    assert (stats.admitted, stats.finished) == (3, {"length": 2, "error:context_length_exceeded": 1})
    assert (stats.prefix_queries, stats.prefix_hits, stats.prompt_tokens) == (18, 8, 10)
    assert (stats.generation_tokens, stats.steps) == (8, 8)
    assert FinishReason.LENGTH in {output.finish_reason for output in rig.ended.values()}


def test_each_iteration_is_recorded() -> None:
    rig = make_rig()
    records = rig.step(rig.request([1, 2, 3], max_tokens=3), rig.request([4], max_tokens=3)).steps
    while rig.core.has_work:
        records += rig.step().steps
    assert [(record.num_requests, record.num_tokens) for record in records] == [(2, 4), (2, 2), (2, 2)]
