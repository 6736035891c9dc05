"""How requests end: by their tokens, refused, aborted, too late, or failed."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.engines.contract.messages import FinishReason, PoolingParams, SamplingParams
from penstock.engines.contract.step import SchedulerOutput
from penstock.kvcache import KVGroup, StateGroup
from unit.engines.scheduler.harness import FIRST, NAN, RAISE, VOCAB, Rig, alone, greedy, make_rig

PROMPT = [0, 1, 1]
OUTPUT = alone(PROMPT, greedy(40))[0]
"""What the model says after PROMPT; each of its eight tokens appears early."""


def code(rig: Rig, request_id: int) -> str:
    error = rig.ended[request_id].error
    assert error is not None
    return error.code


def position(token: int, after: int = 0) -> int:
    """Where the token appears first in OUTPUT, from index `after` on."""
    return OUTPUT.index(token, after)


def test_max_tokens() -> None:
    rig = make_rig(32)
    rig.run(rig.request(PROMPT, max_tokens=5))
    assert rig.tokens[1] == OUTPUT[:5]
    assert rig.ended[1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("token", range(FIRST, VOCAB))
def test_eos_ends_and_is_not_called_a_stop_token(token: int) -> None:
    rig = make_rig(32, eos=(token,))
    rig.run(rig.request(PROMPT, max_tokens=40))
    assert rig.tokens[1] == OUTPUT[: position(token) + 1]
    assert rig.ended[1].finish_reason is FinishReason.STOP
    assert rig.ended[1].stop_token_id is None


def test_a_stop_token_is_named() -> None:
    rig = make_rig(32)
    rig.run(rig.request(PROMPT, params=SamplingParams(temperature=0, max_tokens=40, stop_token_ids=(OUTPUT[2],))))
    assert rig.ended[1].stop_token_id == OUTPUT[2]
    assert rig.tokens[1] == OUTPUT[: position(OUTPUT[2]) + 1]


def test_eos_can_be_ignored_and_stop_tokens_still_count() -> None:
    eos, stop = OUTPUT[0], next(token for token in OUTPUT if token != OUTPUT[0])
    rig = make_rig(32, eos=(eos,))
    rig.step(rig.request(PROMPT, params=SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)))
    rig.run(
        rig.request(
            PROMPT, params=SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop_token_ids=(stop,))
        )
    )
    assert rig.tokens[1] == OUTPUT[:6]
    assert rig.tokens[2] == OUTPUT[: position(stop) + 1]


@pytest.mark.parametrize("min_tokens", range(1, 5))
def test_nothing_stops_before_min_tokens(min_tokens: int) -> None:
    rig = make_rig(32, eos=(OUTPUT[0],))
    rig.run(rig.request(PROMPT, params=SamplingParams(temperature=0, max_tokens=40, min_tokens=min_tokens)))
    assert rig.tokens[1] == OUTPUT[: position(OUTPUT[0], min_tokens) + 1]


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    rig = make_rig(32, eos=(OUTPUT[0],))
    rig.run(rig.request(PROMPT, max_tokens=1))
    assert rig.ended[1].finish_reason is FinishReason.STOP


# -- refused ---------------------------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_at_once() -> None:
    rig = make_rig(4, 4)
    rig.step(rig.request([0] * 10, max_tokens=7), rig.request([0] * 10, max_tokens=6))
    assert code(rig, 1) == "context_length_exceeded"
    assert rig.last.request_ids == [2], "the next one is not held up"


def test_the_refusal_says_how_long_a_request_may_be() -> None:
    """In a pool for two groups of layers, one of which keeps a window of each request."""
    rig = make_rig(40, groups=[KVGroup(4), KVGroup(4, 8)], max_num_batched_tokens=8)
    rig.step(rig.request([0] * 140, max_tokens=1))
    room = 4 * (40 - 5)
    assert f"grow to 141 tokens, but the KV cache has room for {room} of one request" in rig.ended[1].error.message
    rig.run(rig.request([0] * (room - 1), max_tokens=1))
    assert rig.ended[2].finish_reason is FinishReason.LENGTH


def test_the_models_context_is_a_bound_too() -> None:
    rig = make_rig(1000, 4)
    rig.step(rig.request([0] * 900, max_tokens=101))
    assert code(rig, 1) == "context_length_exceeded"
    rig.step(rig.request([0] * 900, max_tokens=100))
    assert rig.last.request_ids == [2]


def test_a_request_needs_a_prompt_and_something_to_generate() -> None:
    rig = make_rig()
    rig.step(rig.request([]), rig.request([0], max_tokens=0))
    assert [code(rig, 1), code(rig, 2)] == ["invalid_request"] * 2


def test_every_sample_of_a_refused_request_is_told() -> None:
    rig = make_rig(4, 4)
    rig.step(rig.request([0] * 100, n=3))
    assert sorted(rig.ended) == [1, 2, 3]
    assert rig.scheduler.stats().finished == {"error:context_length_exceeded": 3}


# -- aborted ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(6))
def test_an_abort_frees_everything_before_the_next_step(steps: int) -> None:
    rig = make_rig(16, 4, max_num_batched_tokens=8)
    rig.step(rig.request([0] * 18, max_tokens=9))
    for _ in range(steps):
        rig.step()
    rig.step(rig.abort(1))
    assert rig.ended[1].finish_reason is FinishReason.ABORT
    assert rig.scheduler.stats().num_free_blocks == 16
    rig.step(rig.abort(1), rig.abort(99))
    assert not rig.core.has_work


def test_an_abort_that_arrives_with_its_request() -> None:
    rig = make_rig()
    rig.step(rig.request([0, 1]), rig.abort(1))
    assert rig.ended[1].finish_reason is FinishReason.ABORT
    assert rig.runner.steps == []


@pytest.mark.parametrize("victim", [1, 2, 3])
@pytest.mark.parametrize("steps", range(5))
def test_each_sample_can_be_aborted_before_at_and_after_the_fork(victim: int, steps: int) -> None:
    rig = make_rig(32, 4, max_num_batched_tokens=8)
    request = rig.request([0] * 10, n=3, max_tokens=6)
    rig.step(request)  # the prompt takes two steps, the fork comes at the end of the second
    for _ in range(steps):
        rig.step()
    rig.run(rig.abort(victim, victim))
    assert rig.ended[victim].finish_reason is FinishReason.ABORT
    others = {1, 2, 3} - {victim}
    assert [rig.tokens[i] for i in others] == [alone([0] * 10, request.params)[0]] * 2


@pytest.mark.parametrize("victims", [(1, 2), (2, 1), (1, 2, 3), (3, 2, 1)])
@pytest.mark.parametrize("steps", range(3))
def test_several_samples_at_once(victims: tuple[int, ...], steps: int) -> None:
    rig = make_rig(32, 4, max_num_batched_tokens=8)
    rig.step(rig.request([0] * 10, n=3, max_tokens=6))
    for _ in range(steps):
        rig.step()
    rig.run(rig.abort(*victims))
    assert {i for i in (1, 2, 3) if rig.ended[i].finish_reason is FinishReason.ABORT} == set(victims)


def test_a_preempted_request_can_be_aborted() -> None:
    rig = make_rig(4, 2, max_num_seqs=2)
    rig.step(rig.request([0, 1], max_tokens=5), rig.request([1, 0, 1], max_tokens=4))
    while not rig.scheduler.stats().preemptions:
        rig.step()
    rig.step(rig.abort(2))
    assert rig.ended[2].finish_reason is FinishReason.ABORT
    assert rig.scheduler.num_waiting == 0
    rig.run()


# -- too late --------------------------------------------------------------------------------------------------


def test_a_deadline_ends_a_request_that_waits_and_one_that_runs() -> None:
    rig = make_rig(max_num_seqs=1)
    late = rig.clock.now + 5
    rig.step(rig.request([0], max_tokens=20, deadline=late), rig.request([1], deadline=late), rig.request([2]))
    rig.clock.now += 4.9
    rig.step()
    assert not rig.ended
    rig.clock.now = late
    rig.step()
    assert [code(rig, 1), code(rig, 2)] == ["deadline_exceeded"] * 2
    assert rig.last.request_ids == [3]


def test_a_deadline_ends_a_preempted_request() -> None:
    rig = make_rig(4, 2, max_num_seqs=2)
    rig.step(rig.request([0, 1], max_tokens=5), rig.request([1, 0, 1], max_tokens=4, deadline=rig.clock.now + 1))
    while not rig.scheduler.stats().preemptions:
        rig.step()
    rig.clock.now += 1
    rig.step()
    assert code(rig, 2) == "deadline_exceeded"


def test_a_deadline_ends_all_samples_before_the_fork() -> None:
    rig = make_rig(32, max_num_batched_tokens=8)
    rig.step(rig.request([0] * 20, n=4, deadline=rig.clock.now + 1))
    rig.clock.now += 2
    rig.step()
    assert [code(rig, i) for i in range(1, 5)] == ["deadline_exceeded"] * 4
    assert not rig.core.has_work


def test_deadlines_of_requests_that_are_gone_wake_nobody() -> None:
    rig = make_rig()
    soon, later = rig.clock.now + 5, rig.clock.now + 9
    rig.step(rig.request([0], max_tokens=1, deadline=soon), rig.request([1], max_tokens=3, deadline=later))
    assert rig.core.next_look == later
    rig.run()
    assert rig.core.next_look is None


def test_many_deadlines_of_requests_that_are_gone_take_no_memory() -> None:
    rig = make_rig(max_num_seqs=8)
    for _ in range(300):
        rig.run(*(rig.request([0], max_tokens=1, deadline=rig.clock.now + 1e6) for _ in range(8)))
    assert len(rig.scheduler.intake._deadlines._heap) <= 1024


# -- failed ----------------------------------------------------------------------------------------------------


def test_a_numerical_error_ends_one_request_and_no_other() -> None:
    rig = make_rig()
    request = rig.request([0, 1])
    rig.run(request, rig.request([0, NAN]))
    assert code(rig, 2) == "numerical_error"
    assert rig.tokens[1] == alone([0, 1], request.params)[0]


def test_what_a_numerical_error_left_behind_is_never_found() -> None:
    rig = make_rig(16, 2)
    rig.run(rig.request([0, NAN, 1, 1]))
    assert rig.scheduler.stats().num_cached_blocks == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("guilty", [{1}, {4}, {2, 3}, {5, 7}, {1, 2, 3, 4, 5, 6, 7}])
def test_a_failed_step_ends_the_guilty_and_nobody_else(depth: int, guilty: set[int]) -> None:
    rig = make_rig(64, max_num_seqs=7, steps_in_flight=depth)
    requests = [rig.request([i, 2, RAISE if i in guilty else 3, 4], max_tokens=5) for i in range(1, 8)]
    late = rig.request([5, 6], max_tokens=2)
    rig.step(*requests)
    rig.run(late)
    for request in (*requests, late):
        (request_id,) = request.ids
        if request_id in guilty:
            assert code(rig, request_id) == "step_failed"
        else:
            assert rig.tokens[request_id] == alone(request.prompt_token_ids, request.params)[0]
    assert not rig.core.failures_in_a_row


def test_a_neighbour_of_a_guilty_one_that_was_given_up_is_not_blamed() -> None:
    rig = make_rig(steps_in_flight=2)
    innocent = rig.request([1] * 4, max_tokens=5)
    rig.step(innocent)
    rig.scheduler.add(rig.request([RAISE], max_tokens=2))
    rig.runner.submit(rig.scheduler.schedule(rig.clock.now))  # the step of both is under way
    rig.run(rig.abort(2))
    assert rig.tokens[1] == alone([1] * 4, innocent.params)[0]


def test_nobody_runs_beside_those_on_trial() -> None:
    rig = make_rig(64, max_num_seqs=5)
    rig.step(rig.request([9], max_tokens=30))
    rig.step(*(rig.request([i, RAISE if i == 2 else 3], max_tokens=9) for i in range(3)))
    rig.step(rig.request([7]))
    steps = [step.request_ids for step in rig.runner.steps]
    rig.step()
    rig.step()
    rig.step()
    assert steps[1] == [1, 2, 3, 4]
    assert [step.request_ids for step in rig.runner.steps[2:6]] == [[1, 2], [3, 4], [3], [4]]
    rig.step()
    assert set(rig.counts()) == {1, 2, 3, 5}, "the trial is over"
    rig.run()
    assert code(rig, 4) == "step_failed"


def test_three_in_a_row_that_fail_alone_call_for_a_new_process() -> None:
    rig = make_rig()
    for count in range(1, 4):
        rig.run(rig.request([RAISE]))
        assert rig.core.failures_in_a_row == count
        assert rig.core.broken == (count == 3)


@pytest.mark.parametrize("batch_mates", [0, 1])
def test_a_runner_that_cannot_forget_a_failed_step_calls_for_a_new_process(
    batch_mates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()

    def stuck() -> None:
        raise RuntimeError("the device does not answer")

    monkeypatch.setattr(rig.runner, "reset", stuck)
    others = [rig.request([i + 1], max_tokens=9) for i in range(batch_mates)]
    refused = rig.request([], max_tokens=1)
    outputs = rig.core.step([rig.request([RAISE]), *others, refused]).outputs
    assert rig.core.broken
    assert refused.ids[0] in {output.id for output in outputs}, "what is known is still told"
    rig.core.check_integrity()


def test_a_step_that_the_runner_does_not_take_is_the_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(steps_in_flight=2)
    first = rig.request([1] * 4, max_tokens=6)
    rig.step(first)
    submit = rig.runner.submit

    def refuse(step: SchedulerOutput) -> None:
        if 2 in step.request_ids:
            raise RuntimeError("there is no room for it")
        submit(step)

    monkeypatch.setattr(rig.runner, "submit", refuse)
    rig.run(rig.request([2], max_tokens=2))
    assert code(rig, 2) == "step_failed"
    assert rig.tokens[1] == alone([1] * 4, first.params)[0]


def test_a_leak_in_the_books_calls_for_a_new_process() -> None:
    rig = make_rig()
    rig.scheduler.kv.pool.allocate(1)
    rig.core.step([rig.request([0], max_tokens=2)])
    assert not rig.core.broken, "what is lost shows when nobody runs"
    rig.core.step([])
    assert not rig.core.has_work
    assert rig.core.broken


def test_a_failed_step_keeps_the_prefix_cache() -> None:
    rig = make_rig()
    rig.run(rig.request(range(8), max_tokens=1))
    rig.run(rig.request([RAISE]))
    assert rig.scheduler.stats().num_cached_blocks == 2
    rig.step(rig.request(range(8), max_tokens=1))
    assert rig.counts() == {3: 1}


@pytest.mark.parametrize("depth", [1, 2])
def test_copies_of_a_failed_step_are_made_again(depth: int) -> None:
    """A hit on everything, and samples that fork, in the same step as the guilty one; a newcomer takes every block that
    is free meanwhile."""
    rig = make_rig(10, max_num_seqs=6, steps_in_flight=depth)
    rig.run(rig.request(range(8), max_tokens=1))
    hit, samples = rig.request(range(8), max_tokens=3), rig.request([3] * 6, n=2, max_tokens=4)
    rig.step(samples)
    rig.run(hit, rig.request([RAISE]), rig.request([8] * 12, max_tokens=3))
    assert rig.scheduler.stats().step_failures
    assert any(step.block_copies for step in rig.runner.steps)
    assert rig.tokens[hit.ids[0]] == alone(range(8), hit.params)[0]
    for request_id in samples.ids:
        assert rig.tokens[request_id] == alone([3] * 6, samples.params)[0]


@pytest.mark.parametrize("depth", [2, 3])
def test_tokens_behind_a_stop_are_discarded(depth: int) -> None:
    rig = make_rig(32, eos=(OUTPUT[4],), steps_in_flight=depth)
    rig.run(rig.request(PROMPT, max_tokens=40))
    end = position(OUTPUT[4]) + 1
    assert rig.tokens[1] == OUTPUT[:end]
    assert len(rig.runner.steps) == end + depth - 1, "steps that were under way when the stop was seen"
    assert rig.scheduler.stats().generation_tokens == end
    assert rig.scheduler.stats().num_free_blocks == 32


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_step_is_wasted_behind_max_tokens(depth: int) -> None:
    rig = make_rig(32, steps_in_flight=depth)
    rig.run(rig.request(PROMPT, max_tokens=7))
    assert len(rig.runner.steps) == 7


def test_no_more_steps_are_under_way_than_the_runner_takes() -> None:
    rig = make_rig(32, steps_in_flight=9)
    rig.run(rig.request(PROMPT, max_tokens=12))
    assert rig.tokens[1] == OUTPUT[:12]
    assert not rig.scheduler.stats().step_failures


@pytest.mark.parametrize("depth", [2, 3])
def test_blocks_come_back_when_no_step_under_way_writes_to_them(depth: int) -> None:
    rig = make_rig(32, steps_in_flight=depth)
    rig.step(rig.request(PROMPT, max_tokens=20))
    assert len(rig.scheduler.under_way) == depth - 1
    rig.scheduler.abort([1], rig.clock.now)
    assert rig.scheduler.stats().num_free_blocks < 32
    assert rig.core.has_work
    rig.run()
    assert rig.scheduler.stats().num_free_blocks == 32
    assert rig.ended[1].finish_reason is FinishReason.ABORT


# -- vectors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
def test_a_vector_is_the_same_beside_others_in_parts_and_from_the_cache(depth: int) -> None:
    rig = make_rig(32, max_num_batched_tokens=8, steps_in_flight=depth)
    rig.run(rig.request(range(16), params=PoolingParams()))
    chat = rig.request([1, 2, 3], max_tokens=9)
    rig.run(chat, rig.request(range(16), params=PoolingParams()), rig.request([5], params=PoolingParams()))
    assert rig.ended[1].pooled == rig.ended[3].pooled != rig.ended[4].pooled
    assert rig.ended[1].pooled is not None
    assert (rig.ended[3].finish_reason, rig.tokens[3]) == (FinishReason.STOP, [])
    assert rig.ended[3].prompt is not None
    assert rig.ended[3].prompt.num_cached_tokens == 15
    assert rig.tokens[2] == alone([1, 2, 3], chat.params)[0]


def test_a_vector_of_a_prompt_as_large_as_the_cache_is_given_again() -> None:
    rig = make_rig(4)
    for _ in range(2):
        rig.run(rig.request(range(16), params=PoolingParams()))
    assert rig.ended[1].pooled == rig.ended[2].pooled


def test_what_vectors_cannot_be_asked_for() -> None:
    rig = make_rig(4)
    rig.step(
        rig.request([1], 2, params=PoolingParams()),
        rig.request([0] * 17, params=PoolingParams()),
        rig.request([VOCAB], params=PoolingParams()),
    )
    assert [code(rig, i) for i in (1, 2, 3, 4)] == ["invalid_request"] * 2 + [
        "context_length_exceeded",
        "invalid_request",
    ]


def test_the_runner_is_not_told_to_drop_what_its_reset_has_dropped() -> None:
    rig = make_rig(4, 2, max_num_seqs=3)
    rig.step(rig.request([0, 1], max_tokens=5), rig.request([1, 0, 1], max_tokens=4))
    rig.step(rig.request([RAISE], max_tokens=1))
    rig.run()
    rig.run(rig.request([0]))
    assert rig.last.dropped_ids == []


@pytest.mark.parametrize("marker", [RAISE, NAN])
def test_samples_share_the_failure_of_their_prompt(marker: int) -> None:
    rig = make_rig()
    steps = rig.run(rig.request([0, marker], n=4))
    assert steps == 1, "the same prompt would fail the same way once for each sample"
    assert sorted(rig.ended) == [1, 2, 3, 4]
    assert len({code(rig, i) for i in range(1, 5)}) == 1


def test_ids_in_use_are_not_taken_twice() -> None:
    rig = make_rig()
    request = rig.request([0], max_tokens=3)
    rig.run(request, request)
    assert rig.tokens[1] == alone([0], request.params)[0]
    assert rig.scheduler.stats().admitted == 1


def test_an_id_is_in_use_until_no_step_computes_it() -> None:
    rig = make_rig(steps_in_flight=2)
    rig.step(rig.request([0], max_tokens=9))
    again = replace(rig.request([1, 1], max_tokens=3), ids=(1,))
    assert rig.scheduler.under_way
    rig.step(rig.abort(1), again)
    rig.run()
    assert not rig.core.has_work
    del rig.ended[1], rig.tokens[1]
    rig.run(again)
    assert rig.tokens[1] == alone([1, 1], again.params)[0]


def test_the_reference_is_not_trivial() -> None:
    assert set(OUTPUT) == set(range(FIRST, VOCAB))


@pytest.mark.parametrize(("start", "budget"), [(6, 2), (7, 3), (10, 2)])
def test_a_suspect_is_on_trial_until_it_has_computed_what_failed(start: int, budget: int) -> None:
    """It went back to a checkpoint, and gets to the fault in its second step: acquitted after the first, it would fail
    beside others again, for ever."""
    limits = {"max_num_batched_tokens": budget, "max_num_seqs": budget}
    rig = make_rig(32, groups=(KVGroup(2),), states=StateGroup(4, 20, 2), **limits)
    rig.run(
        rig.request(range(20), max_tokens=9), rig.request([*range(start), RAISE]), rig.request([7, 8], max_tokens=9)
    )
    assert code(rig, 2) == "step_failed"
    assert [rig.ended[i].finish_reason for i in (1, 3)] == [FinishReason.LENGTH] * 2
