"""What makes one run better than another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.report.figures import COMPARED, value
from penstock.loadtest.report.model import Report
from penstock.loadtest.search.slo import Bound, margins, miss, parse_bounds
from penstock.loadtest.tune.strategies import Score

_RATES = ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s")
NOTHING: Score = (-1.0,)
"""Of a server that did not start, or did not answer."""


class Objective(NamedTuple):
    path: str
    """Of the figure in a report."""
    title: str
    more_is_better: bool

    def of(self, report: Report) -> float | None:
        return value(report, self.path)


def parse_objective(text: str, *, goodput: bool) -> Objective:
    """`goodput`: whether the runs say what a good request is. Raises LoadTestError."""
    titles = {figure.path: figure.title for figure in COMPARED}
    if text in _RATES:
        return Objective(text, titles[text], True)
    if text == "goodput":
        if not goodput:
            raise LoadTestError("objective: what is a good request? (--goodput 'ttft:200 tpot:20')")
        return Objective("goodput.requests_per_s", titles["goodput.requests_per_s"], True)
    try:
        bound = next(bound for bound in parse_bounds([f"{text.replace(' ', '_')}:1"], goodput=False))
    except LoadTestError:
        bound = Bound("errors", 0.0)
    if bound.name == "errors":
        raise LoadTestError(f"objective: {text!r} is none of {', '.join(_RATES)}, goodput, ttft_p99 and the like")
    return Objective(bound.path, f"{str(bound).partition(' ≤')[0]} ms", False)


class Judgement(NamedTuple):
    score: Score
    misses: list[str]


def judge(report: Report, objective: Objective, bounds: Sequence[Bound]) -> Judgement:
    """Runs whose figures can be used come before others, of those the ones that keep the bounds, of those the best;
    where bounds are broken, the nearest to keeping them."""
    found = margins(report, bounds)
    misses = [miss(report, bound) for bound, reached in found.items() if reached > 1]
    measured = objective.of(report)
    if report.completed and measured is None:
        raise LoadTestError(f"objective: these runs have no {objective.title}")
    usable = float(report.validity.verdict != "invalid")
    if misses or measured is None:
        worst = max(found.values(), default=math.inf)
        return Judgement((usable, 0.0, -worst), misses)
    return Judgement((usable, 1.0, measured if objective.more_is_better else -measured), misses)
