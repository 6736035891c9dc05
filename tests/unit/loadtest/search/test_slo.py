"""Bounds on runs."""

from __future__ import annotations

import math

import pytest

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.messages import Sample
from penstock.loadtest.report.model import Report
from penstock.loadtest.search.runs import merge
from penstock.loadtest.search.slo import Bound, margin, miss, parse_bounds
from unit.loadtest.search.computed import answered, chosen, report_of


def report(failed: int = 0, goodput: str = "", seconds: float = 1.0) -> Report:
    """99 good requests of the same length, whose first token comes after a tenth of it."""
    samples = [answered(index, index / 10, index / 10, index / 10 + seconds) for index in range(99)]
    samples += [Sample(index=99, intended=0.0, sent=0.0, ended=0.1, error="http_503")] * failed
    return report_of(chosen(goodput=(goodput,)), samples)


def test_bounds_are_read() -> None:
    bounds = parse_bounds(["ttft_p99:500 itl_p50:20.5", "goodput:0.9"], goodput=True)
    assert bounds == [Bound("ttft_p99", 500), Bound("itl_p50", 20.5), Bound("goodput", 0.9), Bound("errors", 0.01)]
    assert [str(bound) for bound in bounds] == [
        "TTFT p99 ≤ 500 ms",
        "ITL p50 ≤ 20.5 ms",
        "good requests ≥ 90 %",
        "failed requests ≤ 1 %",
    ]
    assert parse_bounds(["errors:0"], goodput=False) == [Bound("errors", 0)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ttft", "not a bound"),
        ("ttft:500", "not a bound"),
        ("ttft_p42:500", "not a bound"),
        ("speed_p99:1", "not a bound"),
        ("ttft_p99", "not milliseconds"),
        ("ttft_p99:0", "not milliseconds"),
        ("ttft_p99:-1", "not milliseconds"),
        ("ttft_p99:inf", "not milliseconds"),
        ("errors:1.5", "not a share"),
        ("goodput:0", "not a share"),
        ("goodput:0.9", "what is a good request"),
        ("ttft_p99:5 ttft_p99:6", "bounded twice"),
    ],
)
def test_bounds_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(LoadTestError, match=said):
        parse_bounds([text], goodput=False)


def test_margins_are_measured_by_allowed() -> None:
    assert margin(report(), Bound("e2e_p99", 500)) == pytest.approx(2.0)
    assert margin(report(), Bound("ttft_max", 200)) == pytest.approx(0.5)
    assert margin(report(failed=1), Bound("errors", 0.02)) == pytest.approx(0.5)
    assert margin(report(failed=1), Bound("errors", 0.0)) == math.inf
    assert margin(report(), Bound("errors", 0.0)) == 0
    assert margin(report(failed=1, goodput="e2e:2000"), Bound("goodput", 0.495)) == pytest.approx(0.5)
    assert margin(report(goodput="e2e:10"), Bound("goodput", 0.5)) == math.inf


def test_failures_are_a_share_of_all_runs_together() -> None:
    one = report(failed=1)
    twice = merge([one, one, one], one.options)
    assert (twice.completed, twice.failed) == (99, 3)
    assert margin(twice, Bound("errors", 0.01)) == pytest.approx(1.0)
    assert miss(twice, Bound("errors", 0.0)) == "failed requests ≤ 0 %: 1 %"


def test_a_run_in_which_nothing_was_completed_breaks_every_bound() -> None:
    nothing = report_of(chosen(), [Sample(index=0, intended=0.0, sent=0.0, ended=1.0, error="timeout")])
    for bound in (Bound("e2e_p50", 1e9), Bound("errors", 1.0), Bound("goodput", 0.1)):
        assert margin(nothing, bound) == math.inf
        assert "nothing was completed" in miss(nothing, bound)


def test_a_figure_that_runs_do_not_have_is_an_error() -> None:
    whole = report_of(chosen(), [Sample(index=0, intended=0.0, sent=0.0, ended=1.0)])
    with pytest.raises(LoadTestError, match="no ttft p50"):
        margin(whole, Bound("ttft_p50", 10))


def test_what_was_missed_is_told_with_what_was_measured() -> None:
    assert miss(report(), Bound("e2e_p99", 500)) == "E2E p99 ≤ 500 ms: 1,000 ms"
    assert miss(report(failed=1), Bound("errors", 0.0)) == "failed requests ≤ 0 %: 1 %"
    assert miss(report(goodput="e2e:10"), Bound("goodput", 0.5)) == "good requests ≥ 50 %: 0 %"
