"""Several runs in one table."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.loadtest.report.figures import COMPARED, GOODPUT, LATENCIES, RATES, value
from penstock.loadtest.report.formatting import number, percent
from penstock.loadtest.report.model import Report
from penstock.loadtest.search.study import Rows

TITLES = {figure.path: f"{figure.title} {figure.unit}".strip() for figure in COMPARED}
NUMBERS = [*(figure.path for figure in COMPARED), "completed", "failed", "verdict"]
"""Heads of `numbers`."""


def figures(head: Sequence[str], firsts: Sequence[Sequence[str]], reports: Sequence[Report]) -> Rows:
    """A row for each run, with the figures that any of them has, after cells of its own. Milliseconds."""
    rates = [figure for figure in (RATES[0], RATES[2]) if any(value(report, figure.path) for report in reports)]
    latencies = [
        (f"{name} {statistic}", f"{field}.{statistic}")
        for field, (name, _) in LATENCIES.items()
        for statistic in ("p50", "p99")
        if field != "itl_ms" and any(value(report, f"{field}.p50") is not None for report in reports)
    ]
    goodput = any(report.goodput for report in reports)
    heads = [*head, *(figure.title for figure in rates), *(name for name, _ in latencies)]
    rows = [
        [
            *first,
            *(number(value(report, figure.path)) for figure in rates),
            *(number(value(report, path)) for _, path in latencies),
            *([percent(value(report, GOODPUT[1].path) or 0.0)] if goodput else []),
            f"{report.failed:,}",
            report.validity.verdict,
        ]
        for first, report in zip(firsts, reports, strict=True)
    ]
    return [*heads, *(["good"] if goodput else []), "failed", "verdict"], rows


def numbers(report: Report) -> list[object]:
    """For programs."""
    compared = [value(report, figure.path) for figure in COMPARED]
    return [*compared, report.completed, report.failed, report.validity.verdict]
