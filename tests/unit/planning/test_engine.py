"""What is planned is what runs: the planned engine gives every token when the engine's own core does."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import NamedTuple

import pytest

from penstock.engines.contract.messages import AddRequest, SamplingParams
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.core import EngineCore
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.simulated import SimulatedConfig, SimulatedRunner
from penstock.kvcache import KVGroup
from penstock.planning.clock import EventQueue
from penstock.planning.engine import PlannedEngine
from penstock.planning.flight import Flight, Gaps, Prompt
from support.planning import STEP, planned


class Wanted(NamedTuple):
    at: float
    prompt: list[int]
    tokens: int


def workload(number: int, rate: float, seed: int, *, longest: int) -> list[Wanted]:
    """Prompts of several steps, and some that begin alike."""
    rng, at, found = random.Random(seed), 0.0, []
    for index in range(number):
        at += rng.expovariate(rate)
        shared = [7] * rng.choice((0, 96))
        own = [100 + index] * rng.randint(1, 400)
        found.append(Wanted(at, shared + own, rng.randint(1, longest)))
    return found


def served(requests: list[Wanted], config: SchedulerConfig, num_blocks: int) -> dict[int, list[float]]:
    """When the core that serves gives each token, on a clock that its device moves."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    runner = SimulatedRunner(SimulatedConfig(num_blocks=num_blocks, latency=STEP), sleep, lambda: now)
    core = EngineCore(runner, config, lambda: now)
    times: dict[int, list[float]] = {number: [] for number in range(1, len(requests) + 1)}
    waiting = list(enumerate(requests, 1))
    while waiting or core.has_work:
        if not core.has_work:
            now = max(now, waiting[0][1].at)
        messages = []
        while waiting and waiting[0][1].at <= now:
            number, wanted = waiting.pop(0)
            params = SamplingParams(max_tokens=wanted.tokens, temperature=0.0)
            messages.append(AddRequest((number,), wanted.prompt, params, wanted.at))
        for output in core.step(messages).outputs:
            times[output.id] += [now] * len(output.token_ids)
    core.close()
    return times


def in_plan(requests: list[Wanted], config: SchedulerConfig, num_blocks: int, *, leaps: bool) -> list[Flight]:
    events, gaps = EventQueue(), Gaps()
    info = ModelInfo(
        vocab_size=32_000,
        max_model_len=32_768,
        kv_groups=(KVGroup(16),),
        num_blocks=num_blocks,
        eos_token_ids=(),
        runner="planned",
    )
    engine = PlannedEngine(info, config, STEP, events, gaps)
    engine.may_leap = leaps
    engine.start()
    flights = []

    def send(flight: Flight) -> None:
        prompt = flight.prompt
        assert prompt is not None
        prompt.flight = flight
        params = SamplingParams(max_tokens=flight.output_tokens, temperature=0.0)
        engine.submit([AddRequest(engine.new_ids(1), prompt, params, events.now)])

    for number, wanted in enumerate(requests):
        flight = Flight(number, Prompt(wanted.prompt), wanted.tokens, due=wanted.at)
        flights.append(flight)
        events.at(wanted.at, lambda flight=flight: send(flight))  # type: ignore[misc]
    events.run(lambda: False)
    assert sum(gaps.counts.values()) == sum(wanted.tokens - 1 for wanted in requests)
    return flights


@pytest.mark.parametrize(
    ("rate", "num_blocks", "steps_in_flight", "batched", "longest"),
    [
        (4.0, 8192, 2, 512, 60),
        (12.0, 8192, 1, 256, 60),
        (12.0, 150, 2, 256, 60),
        (40.0, 60, 2, 64, 60),
        (1.0, 64, 2, 512, 500),
    ],
    ids=["light", "one step at a time", "preempting", "waiting", "growing out of its blocks"],
)
@pytest.mark.parametrize("leaps", [True, False])
def test_tokens_come_when_the_core_that_serves_gives_them(
    rate: float, num_blocks: int, steps_in_flight: int, batched: int, longest: int, *, leaps: bool
) -> None:
    config = SchedulerConfig(
        max_num_seqs=32, max_num_batched_tokens=batched, steps_in_flight=steps_in_flight, itl_target_ms=60.0
    )
    requests = workload(24, rate, seed=num_blocks, longest=longest)
    times = served(requests, config, num_blocks)
    for flight, own in zip(in_plan(requests, config, num_blocks, leaps=leaps), times.values(), strict=True):
        assert flight.num_tokens == len(own)
        assert flight.first == pytest.approx(own[0], abs=1e-9)
        assert flight.ended == pytest.approx(own[-1], abs=1e-9)
        longest = max((b - a for a, b in pairwise(own)), default=None)
        assert (flight.longest_gap or 0.0) == pytest.approx(longest or 0.0, abs=1e-9)


@pytest.mark.parametrize("routing", ["prefix", "least-loaded"])
def test_leaps_change_nothing_in_a_fleet(routing: str) -> None:
    """Neither where requests go, nor when they end, also as a replica dies in the middle of its streams."""
    settings = {
        "replicas": 3,
        "rate": 8,
        "requests": 40,
        "prompt_tokens": 200,
        "prompt_tokens_stddev": 90,
        "shared_prefix_tokens": 64,
        "prefixes": 3,
        "num_kv_blocks": 200,
        "replica_routing": routing,
        "failure": ["replica=1@4"],
        "start_seconds": 2,
    }
    found = []
    for leaps in (True, False):
        flights = planned(leaps=leaps, **settings).flights
        found.append([(f.index, round(f.first or 0, 6), round(f.ended or 0, 6), f.moved, f.error) for f in flights])
    assert found[0] == found[1]
    assert any(row[3] for row in found[0])
