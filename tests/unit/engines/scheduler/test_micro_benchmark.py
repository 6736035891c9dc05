"""The micro benchmark measures what it says: a step of so many decodes, with so many behind them."""

from __future__ import annotations

import pytest

from penstock.engines.scheduler.policy import Policy
from penstock.loadtest.micro.scheduling import Stage
from penstock.loadtest.micro.timing import Measurement, measure


@pytest.mark.parametrize("policy", Policy)
def test_the_stage_decodes_and_nothing_else(policy: Policy) -> None:
    stage = Stage(4, 3, policy)
    scheduler = stage.scheduler
    before = scheduler.stats().generation_tokens
    prompts = scheduler.stats().prompt_tokens
    stage.steps()
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (4, 3)
    assert stats.generation_tokens - before == 4 * 200
    assert (stats.prompt_tokens, stats.preemptions) == (prompts, 0)


def test_a_measurement_is_of_one_operation() -> None:
    runs = 0

    def run() -> None:
        nonlocal runs
        runs += 1

    measurement = measure("nothing", 1000, run, repeats=3)
    assert runs == 4, "one to warm up"
    assert (measurement.name, measurement.operations) == ("nothing", 1000)
    assert Measurement("a step", 0.0005, 1).row().split() == ["a", "step", "500.000", "us", "2,000", "/s"]
