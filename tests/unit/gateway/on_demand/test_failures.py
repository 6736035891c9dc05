"""How long a model that could not be loaded is left alone."""

from __future__ import annotations

from penstock.gateway.on_demand.residents import FIRST_PAUSE, LONGEST_PAUSE, Failures


def test_the_pause_doubles_until_the_model_is_loaded() -> None:
    failures, now, pauses = Failures(), 0.0, []
    for _ in range(7):
        failure = failures.add("m", "why", now)
        assert failures.current("m", failure.until - 0.1) is failure
        assert failures.current("m", failure.until) is None
        pauses.append(failure.pause)
        now = failure.until
    assert pauses == [10, 20, 40, 80, 160, 300, 300]
    assert (FIRST_PAUSE, LONGEST_PAUSE) == (10, 300)
    failures.forget("m")
    assert failures.add("m", "why", now).pause == 10


def test_models_are_told_apart() -> None:
    failures = Failures()
    failures.add("m", "why", 0.0)
    assert failures.current("other", 1.0) is None
