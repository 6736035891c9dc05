"""A shift from step to step, and back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.gateway.configuration.traffic_rules import ShiftRule, ShiftStep, TrafficRule, WeightedTarget
from penstock.gateway.models.traffic.route import TrafficRoute
from penstock.gateway.models.traffic.shift import Shift, ShiftState
from penstock.gateway.requests.record import Outcome

STEPS = (ShiftStep(5, 10), ShiftStep(25, 20), ShiftStep(100, 30))


def shift(**fields: Any) -> tuple[Shift, list[str]]:
    told: list[str] = []
    made = Shift(
        ShiftRule(**{"to": "b", "steps": STEPS, "min_requests": 4} | fields), lambda level, text: told.append(text)
    )
    made.advance(0, new_available=True, old_available=True)
    return made, told


def answer(made: Shift, count: int, now: float = 1, *, target: str = "b", failed: bool = False, seconds: float = 0.1):
    outcome = Outcome.SERVER_ERROR if failed else Outcome.OK
    for _ in range(count):
        made.ended(target, outcome, seconds, now)


def test_it_goes_on_when_a_step_s_time_is_over_and_enough_was_answered() -> None:
    made, told = shift()
    assert made.percent == 5
    answer(made, 4, now=9)
    assert made.percent == 5, "its time is not over"
    made.advance(10, new_available=True, old_available=True)
    assert made.percent == 25
    answer(made, 3, now=100)
    made.advance(100, new_available=True, old_available=True)
    assert made.percent == 25, "too few requests say that it is good"
    answer(made, 1, now=101)
    assert made.percent == 100
    answer(made, 4, now=130)
    assert made.state is ShiftState.RUNNING
    answer(made, 1, now=131)
    assert made.state is ShiftState.COMPLETE
    answer(made, 50, now=132, failed=True)
    assert made.percent == 100, "what is over is not stopped"
    assert told == [
        "shift to b began: 5 %",
        "shift to b: 25 %",
        "shift to b: 100 %",
        "shift to b is complete",
    ]


def test_errors_stop_it_at_once_when_enough_requests_say_so() -> None:
    made, told = shift(max_error_rate=0.25)
    answer(made, 2, failed=True)
    answer(made, 1)
    assert made.state is ShiftState.RUNNING
    answer(made, 1)
    assert (made.state, made.percent) == (ShiftState.ROLLED_BACK, 0)
    assert told[-1] == "shift to b stopped and rolled back: error rate 0.5 above 0.25 (2 failed and 0 refused of 4)"
    answer(made, 50)
    made.advance(1000, new_available=True, old_available=True)
    assert made.percent == 0


def test_errors_of_the_others_and_of_earlier_steps_do_not_count() -> None:
    made, _ = shift(max_error_rate=0.2)
    answer(made, 50, target="a", failed=True)
    answer(made, 9, now=9)
    answer(made, 1, now=10, failed=True)
    assert made.percent == 25
    answer(made, 9, now=11)
    answer(made, 1, now=11, failed=True)
    assert made.state is ShiftState.RUNNING


def test_requests_that_both_refuse_speak_against_neither() -> None:
    made, _ = shift(max_error_rate=0.1)
    for target in ("a", "b"):
        answer(made, 20, target=target)
        for _ in range(12):
            made.ended(target, Outcome.CLIENT_ERROR, None, 1)
    assert made.state is ShiftState.RUNNING
    for _ in range(20):
        made.ended("b", Outcome.CLIENT_ERROR, None, 1)
    assert made.state is ShiftState.ROLLED_BACK


def test_who_leaves_says_nothing() -> None:
    made, _ = shift(max_error_rate=0)
    for outcome in (Outcome.CANCELLED, Outcome.DENIED, Outcome.LIMITED):
        for _ in range(10):
            made.ended("b", outcome, None, 1)
    assert (made.state, made.new.ended) == (ShiftState.RUNNING, 0)


@pytest.mark.parametrize("limit", [{"max_latency_ms": 150}, {"max_latency_ratio": 1.5}])
def test_a_slow_target_stops_it(limit: dict[str, float]) -> None:
    made, told = shift(**limit)
    answer(made, 10, target="a", seconds=0.1)
    answer(made, 18, seconds=0.1)
    assert made.state is ShiftState.RUNNING
    answer(made, 2, seconds=0.5)
    assert made.state is ShiftState.ROLLED_BACK
    assert "p95 latency" in told[-1]


def test_a_ratio_needs_something_to_compare_with() -> None:
    made, _ = shift(max_latency_ratio=1.1)
    answer(made, 3, target="a", seconds=0.001)
    answer(made, 20, seconds=10)
    assert made.state is ShiftState.RUNNING


def test_a_target_that_goes_stops_it_and_one_that_is_not_there_yet_is_waited_for() -> None:
    told: list[str] = []
    made = Shift(ShiftRule(to="b", steps=STEPS), lambda level, text: told.append(text))
    for new, old in ((False, True), (True, False)):
        made.advance(0, new_available=new, old_available=old)
        assert (made.state, made.percent) == (ShiftState.WAITING, 0)
    made.advance(50, new_available=True, old_available=True)
    made.advance(59, new_available=True, old_available=True)
    assert made.percent == 5, "time counts from its beginning"
    made.advance(60, new_available=False, old_available=True)
    assert (made.state, made.reason) == (ShiftState.ROLLED_BACK, "it is not available")


class RouteMachine(RuleBasedStateMachine):
    """Requests come and end, targets go and come back, time passes: whatever happens, each request has one target that
    is there, and ends once; and a shift only ever rises, or falls to 0 for good."""

    def __init__(self) -> None:
        super().__init__()
        made = ShiftRule(to="b", steps=STEPS, min_requests=3, max_error_rate=0.4)
        targets = (WeightedTarget("a", weight=3), WeightedTarget("c", weight=1), WeightedTarget("b"))
        self.route = TrafficRoute(TrafficRule("m", targets, shift=made), lambda level, text: None)
        self.available = {"a", "b", "c"}
        self.now = 0.0
        self.open: list[str] = []
        self.sent = 0
        self.percents = [0.0]
        self.sequences: dict[int, str] = {}

    def _sent(self, target: str) -> None:
        self.route.accepted(target)
        self.open.append(target)
        self.sent += 1

    @rule(number=st.integers(0, 1000))
    def request(self, number: int) -> None:
        target = self.route.choose(b"%d" % number, self.available, self.now)
        if target is None:
            shares = self.route.shares()
            assert not any(shares[each] for each in self.available)
            return
        assert target in self.available
        assert self.route.shares()[target] > 0
        self._sent(target)

    @rule(number=st.integers(0, 5), start=st.booleans(), end=st.booleans())
    def sequence(self, number: int, start: bool, end: bool) -> None:
        known = None if start else self.sequences.get(number)
        target = self.route.choose_for_sequence(
            number, b"s%d" % number, self.available, self.now, start=start, end=end, idle_seconds=1e9
        )
        assert known in (None, target), "a sequence stays where it began"
        if target is not None:
            self._sent(target)
            self.sequences[number] = target
        if end or target is None:
            self.sequences.pop(number, None)

    @rule(which=st.integers(0, 10**6), outcome=st.sampled_from(sorted(Outcome)))
    def end(self, which: int, outcome: Outcome) -> None:
        if self.open:
            self.route.ended(self.open.pop(which % len(self.open)), outcome, 0.1, self.now)

    @rule(seconds=st.floats(0, 40))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(which=st.sampled_from("abc"))
    def goes_or_comes(self, which: str) -> None:
        self.available ^= {which}

    @invariant()
    def nothing_is_lost(self) -> None:
        counts = self.route.counts.values()
        assert sum(each.accepted for each in counts) == self.sent
        assert sum(each.in_flight for each in counts) == len(self.open)

    @invariant()
    def shares_are_whole(self) -> None:
        assert abs(sum(self.route.shares().values()) - 1) < 1e-9

    @invariant()
    def it_rises_or_falls_to_nothing(self) -> None:
        assert self.route.shift is not None
        percent = self.route.shift.percent
        if percent != self.percents[-1]:
            assert percent > self.percents[-1] or percent == 0
            assert self.percents[-1] != 0 or len(self.percents) == 1, "it begins once"
            self.percents.append(percent)


TestRoute = RouteMachine.TestCase
TestRoute.settings = settings(max_examples=40, stateful_step_count=40)
