"""Where the states behind guesses are, and where a request goes on from."""

from __future__ import annotations

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.step import ModelRunnerOutput, NewRequest, SchedulerOutput
from penstock.engines.kit.guess_states import GuessStates
from penstock.kvcache import KVGroup, StateGroup

INFO = ModelInfo(
    vocab_size=9,
    max_model_len=99,
    kv_groups=(KVGroup(4),),
    num_blocks=9,
    states=StateGroup(4, 10, 4),
    guess_states=4,
    eos_token_ids=(),
    runner="",
)


def rows_free(states: GuessStates) -> list[int]:
    return sorted(states._free)


def test_a_request_goes_on_from_its_last_right_guess() -> None:
    states = GuessStates(INFO)
    assert rows_free(states) == [10, 11, 12, 13], "behind those of the pool"
    reads, writes = states.take([1, 2, 3], {2: [5, 6], 3: [7]})
    assert not reads
    assert [len(writes[place]) for place in (1, 2)] == [2, 1]
    states.verified([1, 2, 3], ModelRunnerOutput([[8], [4], [7, 8]]))
    assert len(rows_free(states)) == 3, "all guesses of the third request were right: its state is in its table"
    [kept] = {*range(10, 14)} - {*rows_free(states)}
    assert kept == writes[1][0], "one token came of two guesses: the first was wrong"
    reads, writes = states.take([3, 2], {2: [1, 1, 1]})
    assert reads == {1: kept}
    assert not set(reads.values()) & set(writes[1]), "what a step reads is not written by it"
    states.verified([3, 2], ModelRunnerOutput([[8], [3]]))
    assert states.take([2], {})[0] == {0: writes[1][0]}
    assert states.take([2], {})[0] == {}
    assert len(rows_free(states)) == 4


def test_a_request_that_is_dropped_fails_or_comes_anew_has_no_row() -> None:
    states = GuessStates(INFO)
    states.take([1, 2, 3], {1: [5], 2: [5], 3: [5]})
    states.verified([1, 2, 3], ModelRunnerOutput([[4], [4], []]))
    assert len(rows_free(states)) == 2
    again = NewRequest(2, [1], 1, ([0], [0]), SamplingParams(max_tokens=9), 0)
    states.forget(SchedulerOutput(dropped_ids=[1, 7], new_requests=[again]))
    assert len(rows_free(states)) == 4
    assert states.take([1, 2], {})[0] == {}


def test_a_lost_step_leaves_nothing() -> None:
    states = GuessStates(INFO)
    states.take([1, 2], {1: [5], 2: [5, 5]})
    states.reset()
    assert len(rows_free(states)) == 4
    states.verified([1, 2], ModelRunnerOutput([[4], [4]]))
    assert states.take([1, 2], {})[0] == {}
