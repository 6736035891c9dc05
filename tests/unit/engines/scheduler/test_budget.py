"""How long steps take, as learned from them, and what that makes of a target for the time between tokens."""

from __future__ import annotations

import random

import pytest

from penstock.engines.contract.messages import AddRequest, SamplingParams
from penstock.engines.contract.step import ModelRunnerOutput, SchedulerOutput
from penstock.engines.scheduler.budget import _PROMPT_FLOOR, ONLY_DECODES, Pace
from penstock.engines.scheduler.guessers import DraftModelGuesses
from penstock.engines.scheduler.queues import Policy
from penstock.engines.scheduler.request import Request, Run
from penstock.engines.scheduler.running import StepUnderWay
from penstock.kvcache import BlockTables
from unit.engines.scheduler.harness import FIRST, Rig, make_rig


def machine(num_tokens: int, attended: float) -> float:
    """5 ms, 0.2 ms for each token, 0.1 microseconds for each token that one attends to."""
    return 5e-3 + 2e-4 * num_tokens + 1e-7 * attended


def taught(noise: float = 0.0, num_steps: int = 400) -> Pace:
    rng, pace = random.Random(1), Pace()
    for _ in range(num_steps):
        tokens = rng.choice([1, 4, 16, 64, 256])
        attended = tokens * rng.uniform(10, 4000)
        pace.observe(tokens, attended, machine(tokens, attended) * (1 + rng.uniform(-noise, noise)))
    return pace


@pytest.mark.parametrize(("noise", "error"), [(0.0, 0.02), (0.2, 0.15)])
def test_a_linear_machine_is_learned(noise: float, error: float) -> None:
    pace = taught(noise)
    for tokens, context in ((1, 100), (32, 1000), (256, 3000)):
        expected = machine(tokens, tokens * context)
        assert pace.seconds(tokens, tokens * context) == pytest.approx(expected, rel=error, abs=1e-3)
    assert pace.seconds_per_token(1000) == pytest.approx(3e-4, rel=0.3)


def test_nothing_is_known_before_the_first_step() -> None:
    pace = Pace()
    assert pace.seconds(100, 1000) == 0
    assert pace.tokens_within(0.1, 100) == float("inf")


def test_equal_steps_do_not_spoil_what_was_learned() -> None:
    pace = taught()
    for _ in range(2000):
        pace.observe(32, 32 * 500, machine(32, 32 * 500))
    assert pace.seconds(256, 256 * 500) == pytest.approx(machine(256, 256 * 500), rel=0.1)


def test_a_machine_that_becomes_slower_is_learned_again() -> None:
    rng, pace = random.Random(1), taught()
    for _ in range(600):
        tokens = rng.choice([1, 16, 256])
        pace.observe(tokens, tokens * 100, 3 * machine(tokens, tokens * 100))
    assert pace.seconds(256, 256 * 100) == pytest.approx(3 * machine(256, 256 * 100), rel=0.1)


def test_forced_tokens_go_together_where_that_saves_time() -> None:
    """A step's 5 ms, divided among its requests, against 0.2 ms for a token."""
    scheduler = make_rig(64, max_num_batched_tokens=64).scheduler
    scheduler.budget.pace = taught()
    message = AddRequest((1,), [5] * 10, SamplingParams(max_tokens=20), arrival_time=0.0)
    run = Run(Request(1, message, 0, frozenset()), BlockTables(()), 10)
    run.forced = range(1, 40)
    request = run.request
    request.num_tokens = 11

    def forced(room: int, num_ready: int) -> list[int]:
        return list(scheduler.speculation._forced(run, run.num_pending_tokens, room, num_ready))

    assert forced(100, num_ready=4) == list(range(1, 19))  # and one that is sampled makes 30
    assert forced(7, num_ready=4) == list(range(1, 8))
    assert forced(0, num_ready=4) == []
    assert forced(100, num_ready=60) == []
    run.num_computed_tokens = 13  # a step under way computes two of them, and samples the third
    assert forced(3, num_ready=4) == [4, 5, 6]


# -- plans -----------------------------------------------------------------------------------------------------


def timed_rig(target_ms: float, **config: object) -> Rig:
    """The clock goes on by what a step takes on the machine above."""
    limits: dict[str, object] = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "enable_prefix_caching": False}
    rig = make_rig(4000, 16, itl_target_ms=target_ms, **{"vocab_size": 1 << 30} | limits | config)  # type: ignore[arg-type]

    def after(step: SchedulerOutput, _: ModelRunnerOutput) -> None:
        pairs = zip(step.num_scheduled_tokens, step.num_computed_tokens, strict=True)
        rig.clock.now += machine(step.total_num_scheduled_tokens, sum(n * (start + 0.5 * n) for n, start in pairs))

    rig.runner.after = after
    return rig


def test_steps_in_flight_are_timed_one_after_the_other() -> None:
    rig = timed_rig(0, steps_in_flight=2)
    began, records = rig.clock.now, rig.step(rig.request([1] * 50, max_tokens=10)).steps
    while rig.core.has_work:
        records += rig.step().steps
    assert sum(record.seconds for record in records) == pytest.approx(rig.clock.now - began)


def learn(rig: Rig) -> None:
    for length in (10, 300, 900, 100, 500):
        rig.run(rig.request([1, length] * (length // 2), max_tokens=20))


def run_to_its_end(rig: Rig, message: AddRequest) -> None:
    rig.step(message)
    while message.ids[0] not in rig.ended:
        rig.step()


def durations(rig: Rig, request_id: int) -> list[float]:
    """Of the steps until the request has its first token."""
    taken = []
    while not rig.tokens.get(request_id):
        taken += [record.seconds for record in rig.step().steps]
    return taken


@pytest.mark.parametrize("target_ms", [20, 50, 100])
def test_while_others_generate_a_step_stays_within_the_target(target_ms: float) -> None:
    rig = timed_rig(target_ms)
    learn(rig)
    rig.step(*(rig.request([i, 2, 3], max_tokens=400) for i in range(8)))
    rig.step()
    late = rig.request([4] * 900, max_tokens=2)
    rig.step(late)
    taken = durations(rig, late.ids[0])
    assert max(taken) <= 1.1 * target_ms / 1e3
    assert max(taken) >= 0.7 * target_ms / 1e3, "and uses what the target leaves"


def test_without_a_target_a_step_takes_all_that_it_may() -> None:
    rig = timed_rig(0)
    learn(rig)
    rig.step(rig.request([2, 3], max_tokens=50))
    rig.step(rig.request([4] * 900, max_tokens=2))
    assert rig.last.total_num_scheduled_tokens == 901


def test_while_nobody_generates_steps_may_be_longer() -> None:
    rig = timed_rig(20)
    learn(rig)
    late = rig.request([4] * 900, max_tokens=2)
    rig.step(late)
    taken = durations(rig, late.ids[0])
    assert 0.02 < max(taken) <= 0.09


def test_steps_in_the_background_stay_within_the_target() -> None:
    rig = timed_rig(20)
    learn(rig)
    late = rig.request([4] * 900, max_tokens=2, background=True)
    rig.step(late)
    assert max(durations(rig, late.ids[0])) <= 0.022


@pytest.mark.parametrize("policy", list(Policy))
def test_steps_in_the_background_are_short_while_others_come(policy: Policy) -> None:
    """5 ms and 0.2 ms for each request: some 25 of them make a step twice as long."""
    rig = timed_rig(20, policy=policy)
    learn(rig)
    rig.clock.now += 3
    lines = [rig.request([n, 2, 3], max_tokens=300, background=True) for n in range(60)]
    rig.step(*lines)
    while len(rig.last.request_ids) < 60:
        rig.step()
    run_to_its_end(rig, rig.request([7, 7], max_tokens=2))
    rig.step()
    first = rig.last.request_ids
    assert 15 < len(first) < 28
    assert first == [line.ids[0] for line in lines[: len(first)]]
    rig.clock.now += 1
    rig.step()
    assert rig.last.request_ids == first
    rig.clock.now += 3
    rig.step()
    assert len(rig.last.request_ids) == 60


def test_prompts_in_the_background_are_divided_while_others_come() -> None:
    rig = timed_rig(20)
    learn(rig)
    run_to_its_end(rig, rig.request([7, 7], max_tokens=2))
    late = rig.request([4] * 900, max_tokens=2, background=True)
    rig.step(late)
    assert max(durations(rig, late.ids[0])) <= 0.015, "32 tokens, and what they attend to"


def test_prompts_keep_a_floor_where_decodes_alone_exceed_the_target() -> None:
    rig = timed_rig(6)
    learn(rig)
    rig.step(*(rig.request([i, 2, 3], max_tokens=400) for i in range(40)))
    for _ in range(3):
        rig.step()
    rig.step(rig.request([4] * 900, max_tokens=2))
    assert rig.last.total_num_scheduled_tokens == 40 + _PROMPT_FLOOR


def test_guesses_are_made_where_they_pay() -> None:
    """Alone a request waits for the whole step, and guesses save much of it; one of sixty would save less than its
    guesses cost."""
    for number, some in ((1, True), (60, False)):
        rig = timed_rig(0, speculative="ngram", vocab_size=FIRST + 1)
        learn(rig)
        before = rig.scheduler.stats().draft_tokens
        rig.run(*(rig.request([i, *[FIRST] * 9], max_tokens=30) for i in range(number)))
        made = rig.scheduler.stats().draft_tokens - before
        assert (made > 0) == some, f"{made} guesses for {number} requests"


def test_guesses_that_begin_to_pay_wait_for_the_newest_token() -> None:
    """Of sixty requests one is left, with a step under way that was not to be guessed behind."""
    rig = timed_rig(0, speculative="ngram", vocab_size=FIRST + 1, steps_in_flight=2)
    learn(rig)
    before = rig.scheduler.stats().draft_tokens
    rig.run(*(rig.request([i, *[FIRST] * 9], max_tokens=30 if i else 60) for i in range(60)))  # the runner looks
    assert rig.scheduler.stats().draft_tokens > before


@pytest.mark.parametrize(
    ("number", "seconds", "some"),
    [
        pytest.param(1, 0.001, True, id="alone"),
        pytest.param(1, 0.01, False, id="a draft model that is too slow"),
        pytest.param(9, 0.0, False, id="many requests"),
    ],
)
def test_a_draft_model_is_asked_where_it_pays(number: int, seconds: float, some: bool) -> None:
    rig = timed_rig(0)
    learn(rig)
    for request in (rig.request([i, 1, 2], max_tokens=9) for i in range(number)):
        rig.step(request)
    speculation, runs = rig.scheduler.speculation, rig.scheduler.running.runs
    speculation.draft_pace.observe(1, 0.0, seconds)
    runs[0].request.guesser = DraftModelGuesses(8)
    step = StepUnderWay(1)
    step.include_decodes(runs)
    worth = speculation._weigh(step, ONLY_DECODES)
    assert bool(speculation.guesses(runs[0], 100, worth)) == some
    assert not speculation.guesses(runs[0], 100, worth._replace(prompt_tokens=1)), "prompts go first"
