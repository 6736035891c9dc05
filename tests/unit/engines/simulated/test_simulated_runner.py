"""The simulated runner by itself: a device on a timeline, digests that are read back, faults to order."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from penstock.engines.contract.messages import PoolingParams, SamplingParams
from penstock.engines.contract.step import BlockUpdate, ModelRunnerOutput, NewRequest, SchedulerOutput
from penstock.engines.simulated import LatencyModel, SimulatedConfig, SimulatedRunner
from penstock.engines.simulated.faults import Faults
from penstock.kvcache import KVGroup
from support.simulated import generate, vector

GREEDY = SamplingParams(max_tokens=100, temperature=0)
PROMPT = [5, 3, 9, 1, 7, 2]


class Time:
    """A clock that only sleeping and the test move on."""

    now = 100.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def runner_of(time: Time | None = None, **options: object) -> SimulatedRunner:
    time = time or Time()
    settings: dict[str, object] = {"vocab_size": 1000, "block_size": 4, "num_blocks": 32, "max_steps_in_flight": 3}
    return SimulatedRunner(SimulatedConfig(**settings | options), time.sleep, time.clock)  # type: ignore[arg-type]


def step(
    *spans: tuple[int, int, int],
    new: Sequence[NewRequest] = (),
    copies: Sequence[tuple[int, int]] = (),
    drafts: dict[int, list[int]] | None = None,
    updates: Sequence[BlockUpdate] = (),
    dropped: Sequence[int] = (),
) -> SchedulerOutput:
    """`spans`: (request, first position, tokens)."""
    return SchedulerOutput(
        new_requests=list(new),
        request_ids=[span[0] for span in spans],
        num_computed_tokens=[span[1] for span in spans],
        num_scheduled_tokens=[span[2] for span in spans],
        block_updates=list(updates),
        block_copies=list(copies),
        dropped_ids=list(dropped),
        drafts=drafts or {},
        total_num_scheduled_tokens=sum(span[2] for span in spans),
    )


def new(
    request_id: int,
    tokens: Sequence[int],
    *tables: list[int],
    params: SamplingParams | PoolingParams = GREEDY,
    prompt: int | None = None,
    **fields: object,
) -> NewRequest:
    return NewRequest(
        request_id, list(tokens), prompt or len(tokens), tables or ([0, 1, 2, 3],), params, **{"seed": 0} | fields
    )  # type: ignore[arg-type]


def run(runner: SimulatedRunner, *steps: SchedulerOutput) -> list[ModelRunnerOutput]:
    for each in steps:
        runner.submit(each)
    return [runner.collect() for _ in steps]


def tokens_of(results: Sequence[ModelRunnerOutput]) -> list[int]:
    return [token for result in results for sampled in result.sampled_token_ids for token in sampled]


# -- the device ------------------------------------------------------------------------------------------------


def test_work_of_the_host_hides_behind_the_device() -> None:
    time = Time()
    runner = runner_of(time, latency=LatencyModel(per_step=1.0, per_prefill_token=0.5))
    runner.submit(step((1, 0, 6), new=[new(1, PROMPT)]))
    time.now += 2.0
    runner.submit(step((1, 6, 1)))
    runner.collect()
    assert time.now == 103.5, "one second and five times a half, of which the host has spent two"
    time.now += 0.75
    runner.submit(step((1, 7, 1)))
    runner.collect()
    assert time.now == 104.5
    time.now += 10.0
    runner.collect()
    assert time.now == 114.5, "nobody waits for what is done"
    assert runner.busy_seconds == 5.5


def test_a_step_that_comes_late_finds_the_device_idle() -> None:
    time = Time()
    runner = runner_of(time, latency=LatencyModel(per_step=1.0))
    run(runner, step((1, 0, 6), new=[new(1, PROMPT)]))
    time.now += 5.0
    run(runner, step((1, 6, 1)))
    assert time.now == 107.0
    assert runner.busy_seconds == 2.0


def test_no_more_steps_fit_than_it_says() -> None:
    runner = runner_of(max_steps_in_flight=2)
    runner.submit(step((1, 0, 6), new=[new(1, PROMPT)]))
    runner.submit(step((1, 6, 1)))
    with pytest.raises(RuntimeError, match="no more fit"):
        runner.submit(step((1, 7, 1)))


@pytest.mark.parametrize(
    "options",
    [{"first_token_id": 1000}, {"first_token_id": 9, "end_token_id": 9}, {"end_token_id": 1001}],
)
def test_generated_ids_are_in_the_vocabulary(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="no token ids"):
        runner_of(**options)
    with pytest.raises(ValueError, match="at least 1"):
        runner_of(max_steps_in_flight=0)


# -- tokens ----------------------------------------------------------------------------------------------------

GROUPS = [(KVGroup(4),), (KVGroup(4), KVGroup(2, 3)), (KVGroup(2, 3),)]


@pytest.mark.parametrize("groups", GROUPS, ids=["whole", "both", "window"])
def test_tokens_are_those_of_the_definition(groups: tuple[KVGroup, ...]) -> None:
    """A prompt in two parts, and tokens that build on others which are still to be sampled."""
    runner = runner_of(kv_groups=groups)
    tables = [list(range(10 * g, 10 * g + 8)) for g in range(len(groups))]
    first = run(runner, step((1, 0, 4), new=[new(1, PROMPT, *tables)]), step((1, 4, 2)), step((1, 6, 1)))
    then = run(runner, step((1, 7, 1)), step((1, 8, 1)))
    assert first[0].sampled_token_ids == [[]]
    assert tokens_of([*first, *then]) == generate(runner.info, PROMPT, 4)


def test_what_lies_behind_a_window_is_not_read() -> None:
    groups = (KVGroup(2, 3),)
    runner = runner_of(kv_groups=groups)
    expected = generate(runner.info, PROMPT, 3)
    run(runner, step((1, 0, 6), new=[new(1, PROMPT, [0, 1, 2, 3, 4])]))
    # positions 0..3 are behind position 6's window of 3: their blocks are another request's now
    run(runner, step((2, 0, 4), new=[new(2, [8, 8, 8, 8], [0, 1])]))
    assert tokens_of(run(runner, step((1, 6, 1)), step((1, 7, 1)))) == expected[1:]


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_wrong_block_anywhere_changes_what_follows(wrong: int) -> None:
    """Soon, if not at once: each token looks at one place in the far past."""
    table = [0, 1, 2, 3, 4, 5]
    prompt = list(range(1, 12))
    runner = runner_of()
    run(runner, step((1, 0, 11), new=[new(1, prompt, table)]))
    table[wrong] = 9
    results = run(runner, step((1, 11, 1), updates=[BlockUpdate(1, 0, 0, table)]))
    for position in range(12, 20):
        results += run(runner, step((1, position, 1)))
    assert tokens_of(results) != generate(runner.info, prompt, 10)[1:]


def test_blocks_are_copied_when_their_step_begins() -> None:
    """The source's last tokens are still to be computed when the copy is submitted."""
    runner = runner_of()
    results = run(
        runner,
        step((1, 0, 6), new=[new(1, PROMPT, [0, 1])]),
        step((2, 5, 1), new=[new(2, PROMPT, [0, 2])], copies=[(1, 2)]),
        step((1, 6, 1), (2, 6, 1)),
    )
    first, second = generate(runner.info, PROMPT, 2)
    assert [result.sampled_token_ids for result in results] == [[[first]], [[first]], [[second], [second]]]


def test_a_sample_is_a_function_of_seed_and_number() -> None:
    params = SamplingParams(max_tokens=9, temperature=0.7)
    runner = runner_of()
    expected = generate(runner.info, PROMPT, 4, params=params, seed=3)
    run(runner, step((1, 0, 6), new=[new(1, PROMPT, params=params, seed=3)]), step((1, 6, 1)))
    resumed = new(2, [*PROMPT, *expected[:2]], [4, 5, 6], params=params, seed=3, prompt=6)
    assert tokens_of(run(runner, step((2, 0, 8), new=[resumed], dropped=[1]), step((2, 8, 1)))) == expected[2:]
    assert expected != generate(runner.info, PROMPT, 4, params=params, seed=4)
    assert expected != generate(runner.info, PROMPT, 4)


@pytest.mark.parametrize("right", [0, 1, 3])
def test_guesses_are_kept_up_to_the_first_wrong_one(right: int) -> None:
    runner = runner_of()
    expected = generate(runner.info, PROMPT, 8)
    guesses = expected[1 : 1 + right] + [0] * (3 - right)
    [_, verified] = run(
        runner,
        step((1, 0, 6), new=[new(1, PROMPT)]),
        step((1, 6, 4), drafts={1: guesses}),
    )
    assert verified.sampled_token_ids == [expected[1 : 2 + right]]
    start = 7 + right
    assert tokens_of(run(runner, step((1, start, 1)))) == expected[2 + right : 3 + right]


def test_a_vector_comes_with_the_last_token() -> None:
    runner = runner_of()
    asked = new(1, PROMPT, params=PoolingParams())
    first, last = run(runner, step((1, 0, 4), new=[asked]), step((1, 4, 2)))
    assert first.pooled == {}
    assert last.pooled == {1: vector(runner.info, PROMPT)}
    assert first.sampled_token_ids == last.sampled_token_ids == [[]]


def test_an_adapter_that_is_not_there_ends_its_request() -> None:
    runner = runner_of(max_loras=1)
    [result] = run(runner, step((1, 0, 6), (2, 0, 1), new=[new(1, PROMPT, adapter="x:1"), new(2, [4], [5])]))
    assert [(i, error.code) for i, error in result.failed.items()] == [(1, "model_not_found")]
    assert result.sampled_token_ids == [[], generate(runner.info, [4], 1)]


# -- faults ----------------------------------------------------------------------------------------------------


def test_not_a_number_ends_one_request_and_poisons_what_it_wrote() -> None:
    runner = runner_of(faults="nan=99")
    bad, good = [*PROMPT[:5], 99], PROMPT
    results = run(
        runner,
        step((1, 0, 6), (2, 0, 6), new=[new(1, bad, [0, 1]), new(2, good, [2, 3])]),
        step((1, 6, 1), (2, 6, 1)),
    )
    expected = generate(runner.info, good, 2)
    assert [result.sampled_token_ids for result in results] == [[[], [expected[0]]], [[], [expected[1]]]]
    failed = [[(i, error.code) for i, error in result.failed.items()] for result in results]
    assert failed == [[(1, "numerical_error")]] * 2
    reader = new(3, [*PROMPT[:5], 4], [0, 9])
    assert tokens_of(run(runner, step((3, 4, 2), new=[reader]))) != generate(runner.info, reader.token_ids, 1)


def test_a_step_that_raises_leaves_what_was_there_before() -> None:
    runner = runner_of(faults="raise=99")
    expected = generate(runner.info, PROMPT, 3)
    run(runner, step((1, 0, 6), new=[new(1, PROMPT)]))
    runner.submit(step((1, 6, 1), (2, 0, 1), new=[new(2, [99], [5])], copies=[(1, 7)]))
    runner.submit(step((1, 7, 1)))
    with pytest.raises(RuntimeError):
        runner.collect()
    runner.reset()
    again = new(1, [*PROMPT, expected[0]], prompt=6)
    assert tokens_of(run(runner, step((1, 6, 1), new=[again]), step((1, 7, 1)))) == expected[1:]


def test_a_marker_that_was_generated_is_a_token_like_any_other() -> None:
    """Also where the request is told again, with its output, after a preemption."""
    expected = generate(runner_of().info, PROMPT, 4)
    runner = runner_of(faults=",".join(f"raise={token}" for token in expected))
    steps = step((1, 0, 6), new=[new(1, PROMPT)]), step((1, 6, 1)), step((1, 7, 1))
    assert tokens_of(run(runner, *steps)) == expected[:3]
    runner.reset()
    again = new(1, [*PROMPT, *expected[:3]], prompt=6)
    assert tokens_of(run(runner, step((1, 0, 9), new=[again]))) == expected[3:]


def test_a_slow_step_ends() -> None:
    time = Time()
    runner = runner_of(time, faults="slow=99:2.5")
    assert tokens_of(run(runner, step((1, 0, 1), new=[new(1, [99])]))) == generate(runner.info, [99], 1)
    assert time.now == 102.5


def test_a_step_that_stalls_ends_when_the_runner_is_closed() -> None:
    runner = runner_of(faults="stall=99")
    runner.submit(step((1, 0, 1), new=[new(1, [99])]))
    raised: list[Exception] = []

    def collect() -> None:
        try:
            runner.collect()
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=collect)
    thread.start()
    assert not raised
    runner.close()
    thread.join(30)
    assert raised


@pytest.mark.parametrize("text", ["burn=7", "kill", "kill=", "nan=x", "nan=7:2", "slow=7:", "slow=7:x", "slow=7:1.2.3"])
def test_faults_that_cannot_be(text: str) -> None:
    with pytest.raises(ValueError, match="a fault is one of"):
        Faults.parse(text)
