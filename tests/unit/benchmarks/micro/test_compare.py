"""When a difference is one."""

from __future__ import annotations

import pytest

from benchmarks.micro.compare import compare
from benchmarks.micro.table import comparison, span
from unit.benchmarks.micro.samples import made


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.0, "noise"), (1.04, "noise"), (1.06, "slower"), (0.96, "noise"), (0.94, "faster")]
)
def test_quiet_times_differ_from_five_percent_on(factor: float, verdict: str) -> None:
    found = compare(made(*[1e-6 * factor] * 5), made(*[1e-6] * 5))
    assert found.time == pytest.approx(factor)
    assert (found.time_verdict, found.instructions) == (verdict, None)


def test_what_varies_has_to_differ_by_more_than_that() -> None:
    before = made(0.9, 0.95, 1.0, 1.05, 1.1)
    assert compare(made(0.99, 1.045, 1.1, 1.155, 1.21), before).time_verdict == "noise"
    assert compare(made(1.08, 1.14, 1.2, 1.26, 1.32), before).time_verdict == "slower"


def test_a_neighbour_that_came_and_went_is_no_difference() -> None:
    assert compare(made(1.0, 1.99, 2.0, 2.01, 2.02), made(*[1.0] * 5)).time_verdict == "noise"


@pytest.mark.parametrize("busy", [(0.2, 0.0), (0.0, 0.2)])
def test_a_busy_machine_says_nothing_of_time_but_counts_hold(busy: tuple[float, float]) -> None:
    now, before = (made(t, t, instructions=c, others=o) for t, c, o in ((2.0, 103, busy[0]), (1.0, 100, busy[1])))
    found = compare(now, before)
    assert (found.time_verdict, found.instructions_verdict) == ("busy machine", "more")
    assert found.instructions == pytest.approx(1.03)


@pytest.mark.parametrize(("now", "verdict"), [(101.9, "noise"), (102.1, "more"), (98.1, "noise"), (97.9, "fewer")])
def test_counts_differ_from_two_percent_on(now: float, verdict: str) -> None:
    assert compare(made(1, 1, instructions=now), made(1, 1, instructions=100)).instructions_verdict == verdict


def test_counts_of_one_run_alone_are_not_compared() -> None:
    for now, before in ((100, None), (None, 100)):
        assert compare(made(1, 1, instructions=now), made(1, 1, instructions=before)).instructions is None


def test_the_table_of_a_comparison() -> None:
    before = {"blocks/hash": made(1e-6, 1e-6)}
    text = comparison([made(2e-6, 2e-6), made(1, 1, name="stop/new")], before)
    assert text.splitlines()[1].split() == ["blocks/hash", "1.00", "us", "2.00", "us", "2.00", "slower", "–"]
    assert text.splitlines()[-1] == "not in the earlier file: stop/new"
    assert comparison([made(1, 1, name="stop/new")], before).startswith("nothing to compare")


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0 ns"), (1.5e-10, "0.150 ns"), (1.5e-7, "150 ns"), (2e-3, "2.00 ms"), (12.0, "12.0 s")]
)
def test_times_have_the_unit_that_suits_them(seconds: float, text: str) -> None:
    assert span(seconds) == text
