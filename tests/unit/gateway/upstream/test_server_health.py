"""Which servers get requests, by what has become of the last ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.gateway.upstream.fleet import RetryBudget
from penstock.gateway.upstream.server import ServerHealth

EJECT_AFTER, SECONDS = 3, 5.0


class HealthMachine(RuleBasedStateMachine):
    """Beside a model that keeps the whole story."""

    def __init__(self) -> None:
        super().__init__()
        self.health = ServerHealth(EJECT_AFTER, SECONDS)
        self.now = 0.0
        self.failures = 0
        self.ejected_until: float | None = None
        self.span = SECONDS
        self.rests_until = 0.0
        self.missed = 0

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def begins(self) -> None:
        self.health.began()
        self.ejected_until, self.missed = None, 0

    @rule()
    def answers(self) -> None:
        self.health.answered()
        self.failures, self.ejected_until, self.span, self.missed = 0, None, SECONDS, 0

    @rule()
    def fails(self) -> None:
        self.health.failed(self.now)
        self.failures += 1
        on_trial = self.ejected_until is not None and self.now >= self.ejected_until
        if on_trial or (self.ejected_until is None and self.failures >= EJECT_AFTER):
            self.ejected_until = self.now + self.span
            self.span = min(2 * self.span, 60.0)

    @rule(seconds=st.sampled_from([1.0, 30.0]))
    def asks_for_rest(self, seconds: float) -> None:
        self.health.rests(self.now + seconds)
        self.rests_until = max(self.rests_until, self.now + seconds)

    @rule(there=st.booleans())
    def probed(self, there: bool) -> None:
        self.health.probed(there=there)
        self.missed = 0 if there else self.missed + 1

    @invariant()
    def takes_requests_when_it_should(self) -> None:
        there = self.missed < 2 and self.now >= self.rests_until
        over = self.ejected_until is None or self.now >= self.ejected_until
        assert self.health.takes_requests(self.now, 0) == (there and over)
        assert self.health.takes_requests(self.now, 1) == (there and self.ejected_until is None)
        assert self.health.healthy == (self.ejected_until is None and self.missed < 2)

    @invariant()
    def says_how_long(self) -> None:
        wait = self.health.seconds_until(self.now)
        assert wait == max(0.0, self.rests_until - self.now, (self.ejected_until or 0.0) - self.now)


TestHealth = HealthMachine.TestCase


def test_answers_that_begin_and_break_eject_a_server() -> None:
    health = ServerHealth(EJECT_AFTER, SECONDS)
    for _ in range(EJECT_AFTER):
        health.began()
        health.failed(0.0)
    assert not health.takes_requests(SECONDS - 1, 0)
    health.began()  # on trial, again
    health.failed(SECONDS)
    assert health.seconds_until(SECONDS) == 2 * SECONDS


@given(st.lists(st.booleans(), max_size=300), st.floats(0, 1))
def test_retries_are_a_part_of_the_requests(story: list[bool], ratio: float) -> None:
    budget = RetryBudget(ratio)
    asked = taken = 0
    for is_request in story:
        if is_request:
            budget.asked()
            asked += 1
        elif budget.take():
            taken += 1
    assert taken <= (10 + asked * ratio if ratio else 0) + 1e-6
