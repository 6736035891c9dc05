"""How requests end: by their tokens, refused, aborted, too late, or failed."""

from __future__ import annotations

import pytest

from penstock.engines.contract.messages import FinishReason, SamplingParams
from unit.engines.scheduler.harness import NAN, RAISE, Rig, alone, make_rig, next_token

PROMPT = [0, 1, 1]
OUTPUT = alone(PROMPT, SamplingParams(max_tokens=40))[0]
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


@pytest.mark.parametrize("token", range(8))
def test_eos_ends_and_is_not_called_a_stop_token(token: int) -> None:
    rig = make_rig(32, eos=(token,))
    rig.run(rig.request(PROMPT, max_tokens=40))
    assert rig.tokens[1] == OUTPUT[: position(token) + 1]
    assert rig.ended[1].finish_reason is FinishReason.STOP
    assert rig.ended[1].stop_token_id is None


def test_a_stop_token_is_named() -> None:
    rig = make_rig(32)
    rig.run(rig.request(PROMPT, params=SamplingParams(max_tokens=40, stop_token_ids=(OUTPUT[2],))))
    assert rig.ended[1].stop_token_id == OUTPUT[2]
    assert rig.tokens[1] == OUTPUT[: position(OUTPUT[2]) + 1]


def test_eos_can_be_ignored_and_stop_tokens_still_count() -> None:
    eos, stop = OUTPUT[0], next(token for token in OUTPUT if token != OUTPUT[0])
    rig = make_rig(32, eos=(eos,))
    rig.step(rig.request(PROMPT, params=SamplingParams(max_tokens=6, ignore_eos=True)))
    rig.run(rig.request(PROMPT, params=SamplingParams(max_tokens=40, ignore_eos=True, stop_token_ids=(stop,))))
    assert rig.tokens[1] == OUTPUT[:6]
    assert rig.tokens[2] == OUTPUT[: position(stop) + 1]


@pytest.mark.parametrize("min_tokens", range(1, 5))
def test_nothing_stops_before_min_tokens(min_tokens: int) -> None:
    rig = make_rig(32, eos=(OUTPUT[0],))
    rig.run(rig.request(PROMPT, params=SamplingParams(max_tokens=40, min_tokens=min_tokens)))
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


def test_many_deadlines_of_requests_that_are_gone_take_no_memory() -> None:
    rig = make_rig(max_num_seqs=8)
    for _ in range(300):
        rig.run(*(rig.request([0], max_tokens=1, deadline=rig.clock.now + 1e6) for _ in range(8)))
    assert len(rig.scheduler._deadlines._heap) <= 1024


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


def test_a_failed_step_ends_its_requests_and_keeps_those_that_wait() -> None:
    rig = make_rig(max_num_seqs=2)
    first, failing, waiting = rig.request([0, 1, 0]), rig.request([RAISE]), rig.request([0, 1])
    rig.step(first, failing, waiting)
    assert [code(rig, 1), code(rig, 2)] == ["step_failed"] * 2
    assert rig.core.failures_in_a_row == 1
    rig.run()
    assert rig.tokens[3] == alone([0, 1], waiting.params)[0]
    assert rig.core.failures_in_a_row == 0


def test_a_failed_step_drops_the_prefix_cache() -> None:
    rig = make_rig()
    rig.run(rig.request(range(8), max_tokens=1))
    assert rig.scheduler.stats().num_cached_blocks == 2
    rig.step(rig.request([RAISE]))
    assert rig.scheduler.stats().num_cached_blocks == 0
    rig.step(rig.request(range(8), max_tokens=1))
    assert rig.counts() == {3: 8}


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


def test_the_reference_is_not_trivial() -> None:
    assert set(OUTPUT) == set(range(8))
    assert next_token([0]) != next_token([0, 0])
