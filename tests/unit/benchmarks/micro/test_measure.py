"""Rounds are as long as they should be, what they do is counted right, and nothing else runs meanwhile."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from benchmarks.micro import measure as module
from benchmarks.micro.benchmark import Work
from benchmarks.micro.measure import LEAST_ROUNDS, measure


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.calls = 0
        monkeypatch.setattr(module, "perf_counter", lambda: self.now)

    def taking(self, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.now += seconds
            self.calls += 1

        return run


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_short_work_is_repeated_until_a_round_is_long_enough(clock: Clock) -> None:
    rounds = measure(Work(clock.taking(1e-5), operations=4), 1.0)
    assert rounds.seconds == pytest.approx([2.5e-6] * len(rounds.seconds))
    length = rounds.operations / 4 * 1e-5
    assert 0.01 <= length < 0.012, "a hundredth of the time, as in the calibration, and a little more"
    assert 1.0 <= len(rounds.seconds) * length < 1.0 + length


def test_long_work_is_called_once_in_each_of_the_fewest_rounds(clock: Clock) -> None:
    rounds = measure(Work(clock.taking(3.0)), 1.0)
    assert rounds.seconds == pytest.approx([3.0] * LEAST_ROUNDS)
    assert rounds.operations == 1
    assert clock.calls == LEAST_ROUNDS + 2, "two to warm up"


def test_a_first_call_that_had_to_wait_does_not_decide(clock: Clock) -> None:
    quick = clock.taking(1e-5)

    def run() -> None:
        quick()
        if clock.calls == 1:
            clock.now += 0.5

    assert measure(Work(run), 1.0).operations >= 1000, "rounds of a hundredth of the time"


def test_renewing_is_not_timed_and_precedes_every_call(clock: Clock) -> None:
    fresh: list[bool] = []
    spend = clock.taking(1e-6)

    def renew() -> None:
        clock.now += 100.0
        fresh.append(True)

    def run() -> None:
        fresh.pop()
        spend()

    rounds = measure(Work(run, operations=10, renew=renew), 0.0)
    assert rounds.seconds == pytest.approx([1e-7] * LEAST_ROUNDS, rel=1e-3)
    assert rounds.operations == 10
    assert not fresh


def test_work_that_the_clock_does_not_see_is_called_more_and_more(clock: Clock) -> None:
    tick = clock.taking(0.0)

    def run() -> None:
        tick()
        if clock.calls > 500:
            clock.now += 1e-3

    assert measure(Work(run), 0.0).operations == 1000


def test_the_garbage_collector_waits(clock: Clock) -> None:
    seen: set[bool] = set()
    spend = clock.taking(1.0)

    def run() -> None:
        seen.add(gc.isenabled())
        spend()

    measure(Work(run), 0.0)
    assert seen == {False}
    assert gc.isenabled()

    def fail() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        measure(Work(fail), 0.0)
    assert gc.isenabled()
