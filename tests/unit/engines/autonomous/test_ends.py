"""How requests end that an engine with its own scheduler works on: given up, out of time, refused, or failed."""

from __future__ import annotations

import pytest

from penstock.engines.autonomous.core import AutonomousCore
from penstock.engines.contract.continuous_batcher import BatcherOutput, NewTokens, StartRequest
from penstock.engines.contract.messages import (
    AbortRequests,
    AddRequest,
    FinishReason,
    RequestOutput,
    SamplingParams,
)
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import InvalidRequestError, NumericalError
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.kvcache import KVGroup
from unit.engines.autonomous.rig import AutonomousRig, make_rig
from unit.engines.scheduler.harness import NAN, RAISE, Clock


def ends(rig: AutonomousRig) -> dict[int, str]:
    return {i: o.error.code if o.error is not None else str(o.finish_reason) for i, o in rig.ended.items()}


def test_an_abort_of_one_that_waits_is_none_of_the_engines_business() -> None:
    rig = make_rig(max_num_seqs=1)
    rig.step(rig.request([1], max_tokens=9), rig.request([2] * 5))
    rig.step(rig.abort(2))
    assert ends(rig) == {2: "abort"}
    assert rig.batcher.aborted == []
    assert rig.core.stats().num_waiting == rig.core.stats().num_waiting_tokens == 0


def test_aborts_of_one_message_reach_the_engine_together_and_once() -> None:
    rig = make_rig()
    rig.step(*(rig.request([i], max_tokens=50) for i in range(4)))
    rig.step(rig.abort(1, 3, 3, 99), rig.abort(3))
    assert rig.batcher.aborted == [[1, 3]]
    assert ends(rig) == {1: "abort", 3: "abort"}
    rig.run()
    assert rig.core.stats().finished == {"abort": 2, "length": 2}


def test_an_abort_that_comes_with_its_request_never_reaches_the_engine() -> None:
    rig = make_rig()
    rig.run(rig.request([1], n=2), rig.abort(1, 2))
    assert rig.started() == []
    assert ends(rig) == {1: "abort", 2: "abort"}


def test_deadlines_hold_while_waiting_and_while_running() -> None:
    rig = make_rig(max_num_seqs=1)
    deadline = rig.clock.now + 5
    rig.step(rig.request([1], max_tokens=90, deadline=deadline), rig.request([2], deadline=deadline - 2))
    assert rig.core.next_look == deadline - 2
    rig.clock.now = deadline - 2
    rig.step()
    assert ends(rig) == {2: "deadline_exceeded"}
    assert "scheduled" in rig.ended[2].error.message  # type: ignore[union-attr]
    assert rig.core.next_look == deadline
    rig.clock.now = deadline
    rig.step()
    assert ends(rig) == {1: "deadline_exceeded", 2: "deadline_exceeded"}
    assert "complete" in rig.ended[1].error.message  # type: ignore[union-attr]
    assert rig.batcher.aborted == [[1]]
    rig.run()
    assert rig.core.next_look is None


@pytest.mark.parametrize(
    ("error", "code"), [(InvalidRequestError("no"), "invalid_request"), (ValueError("no"), "invalid_request")]
)
def test_a_request_that_the_engine_does_not_take_ends_alone(error: Exception, code: str) -> None:
    rig = make_rig(max_num_seqs=1)
    rig.batcher.refuses = error
    rig.run(rig.request([1]), rig.request([2]))
    assert ends(rig) == {1: code, 2: "length"}
    assert rig.ended[1].error is not None
    assert rig.ended[1].error.message == "no"


def test_an_error_of_one_request_leaves_its_neighbours_alone() -> None:
    rig = make_rig()
    rig.run(rig.request([NAN]), rig.request([2]))
    assert ends(rig) == {1: "numerical_error", 2: "length"}
    assert rig.core.stats().finished == {"error:numerical_error": 1, "length": 1}


def test_a_failed_step_ends_what_runs_and_the_engine_with_it() -> None:
    rig = make_rig(max_num_seqs=2)
    rig.step(rig.request([1], max_tokens=9))
    rig.step(rig.request([RAISE]), rig.request([3]))
    assert ends(rig) == {1: "step_failed", 2: "step_failed"}, "who waits learns from the gateway that the engine died"
    assert rig.core.broken
    assert not rig.core.has_work
    assert rig.core.stats().num_free_blocks == 0


def test_since_when_an_engine_is_silent() -> None:
    rig = make_rig()
    assert rig.core.quiet_since is None
    rig.clock.now += 1000
    rig.step(rig.request([1], max_tokens=9))
    last = rig.clock.now
    rig.batcher.step = BatcherOutput  # type: ignore[method-assign]
    rig.clock.now += 50
    rig.step(rig.request([2]))
    assert rig.core.quiet_since == last, "a new request is no sign"
    del rig.batcher.step  # type: ignore[method-assign]
    rig.step()
    assert rig.core.quiet_since == rig.clock.now
    rig.run()
    assert rig.core.quiet_since is None, "who holds nothing may be silent"


class Scripted:
    """A batcher that says what the test tells it to say."""

    info = ModelInfo(
        vocab_size=8, max_model_len=1000, kv_groups=(KVGroup(4),), num_blocks=50, eos_token_ids=(), runner="scripted"
    )
    wakeup: int | None = None
    num_free_blocks = 50

    def __init__(self) -> None:
        self.says = BatcherOutput()
        self.started: list[StartRequest] = []

    def start(self, request: StartRequest) -> None:
        self.started.append(request)

    def abort(self, ids: object) -> None:
        pass

    def step(self) -> BatcherOutput:
        says, self.says = self.says, BatcherOutput()
        return says

    def close(self) -> None:
        pass


@pytest.fixture
def batcher() -> Scripted:
    return Scripted()


@pytest.fixture
def core(batcher: Scripted) -> AutonomousCore:
    core = AutonomousCore(batcher, SchedulerConfig(max_num_seqs=3), Clock())
    core.step([AddRequest((1,), [1, 2], SamplingParams(max_tokens=9), 1000.0)])
    return core


def say(
    core: AutonomousCore, batcher: Scripted, *tokens: NewTokens, released: tuple[int, ...] = ()
) -> list[RequestOutput]:
    batcher.says = BatcherOutput(list(tokens), list(released))
    outputs = core.step([]).outputs
    core.check_integrity()
    return outputs


def test_nothing_new_of_a_request_is_no_output(core: AutonomousCore, batcher: Scripted) -> None:
    assert say(core, batcher, NewTokens(1, [])) == []
    [output] = say(core, batcher, NewTokens(1, [5]))
    assert output.prompt is not None, "the first tokens are these"


def test_several_pieces_of_one_request_in_one_step(core: AutonomousCore, batcher: Scripted) -> None:
    first, last = say(core, batcher, NewTokens(1, [5]), NewTokens(1, [6, 7], FinishReason.STOP, 7))
    assert (first.token_ids, first.prompt is not None) == ([5], True)
    assert (last.token_ids, last.finish_reason, last.stop_token_id) == ([6, 7], FinishReason.STOP, 7)
    assert last.prompt is None
    assert core.stats().num_running == 0


def test_tokens_after_the_end_or_of_nobody_are_dropped(core: AutonomousCore, batcher: Scripted) -> None:
    say(core, batcher, NewTokens(1, [5], FinishReason.LENGTH))
    batcher.says = BatcherOutput([NewTokens(1, [6]), NewTokens(77, [6], FinishReason.STOP)], [1, 88])
    core.step([AddRequest((2,), [1], SamplingParams(max_tokens=9), 1000.0)])
    core.check_integrity()
    assert core.stats().num_running == 1


def test_an_end_without_tokens_still_tells_of_the_prompt(core: AutonomousCore, batcher: Scripted) -> None:
    [output] = say(core, batcher, NewTokens(1, [], FinishReason.STOP))
    assert output.prompt is not None
    assert core.stats().prompt_tokens == 2


@pytest.mark.parametrize(
    ("error", "code"), [(NumericalError("x"), "numerical_error"), (None, "engine_error")], ids=["named", "nameless"]
)
def test_errors_have_a_code_and_no_prompt(
    core: AutonomousCore, batcher: Scripted, error: NumericalError | None, code: str
) -> None:
    [output] = say(core, batcher, NewTokens(1, [], FinishReason.ERROR, error=error))
    assert output.error is not None
    assert output.error.code == code
    assert output.prompt is None
    assert core.stats().finished == {f"error:{code}": 1}
    assert core.stats().prompt_tokens == 0


def test_a_release_of_one_that_was_not_given_up_changes_nothing(core: AutonomousCore, batcher: Scripted) -> None:
    say(core, batcher, released=(1,))
    assert core.stats().num_running == 1
    [output] = say(core, batcher, NewTokens(1, [5], FinishReason.LENGTH))
    assert output.finish_reason is FinishReason.LENGTH


def test_an_abort_that_crosses_the_end_frees_the_seat_once(core: AutonomousCore, batcher: Scripted) -> None:
    core.step([AbortRequests([1])])
    assert say(core, batcher, NewTokens(1, [5], FinishReason.LENGTH), released=(1,)) == []
    assert core.stats().num_running == 0
    assert core.stats().finished == {"abort": 1}


def test_the_blocks_of_an_aborted_prompt_stay_promised_until_it_is_released(
    core: AutonomousCore, batcher: Scripted
) -> None:
    """The engine's number of free blocks is old: it does not know yet of what it was handed."""
    core.step([AddRequest((2,), [1] * 180, SamplingParams(max_tokens=9), 1000.0)])
    core.step([AbortRequests([2]), AddRequest((3,), [1] * 40, SamplingParams(max_tokens=9), 1000.0)])
    assert [request.id for request in batcher.started] == [1, 2]
    say(core, batcher, released=(2,))
    core.step([])
    assert [request.id for request in batcher.started] == [1, 2, 3]
