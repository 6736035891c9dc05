"""The objective of tuning, by which one run is better than another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.latency import parse_objectives
from penstock.loadtest.options import Options, check_latencies
from penstock.loadtest.report.figures import COMPARED, value
from penstock.loadtest.report.model import Report
from penstock.loadtest.search.slo import Bound, margins, miss, parse_bounds
from penstock.loadtest.tune.params import Score
from penstock.loadtest.workload.contents import TENSORS

_RATES = ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s")
_WITHOUT_TOKENS = dict.fromkeys(TENSORS, _RATES[:2]) | {"openai-embeddings": _RATES[:1]}
NOTHING: Score = (-1.0,)
"""Of a server that did not start, or did not answer."""


class Objective(NamedTuple):
    path: str
    """Of the figure in a report."""
    title: str
    more_is_better: bool

    def of(self, report: Report) -> float | None:
        return value(report, self.path)


def parse_objective(text: str, options: Options) -> Objective:
    """Of runs with these settings; without a text, the throughput that they have. Raises LoadTestError, also for what
    such runs never have."""
    protocol = options.target.protocol
    without = _WITHOUT_TOKENS.get(protocol, ())
    text = text or next(rate for rate in _RATES if rate not in without)
    titles = {figure.path: figure.title for figure in COMPARED}
    if text in without:
        raise LoadTestError(f"objective: {protocol} has no {titles[text].partition('/')[0].lower()}; requests_per_s")
    if text in _RATES:
        return Objective(text, titles[text], True)
    if text == "goodput":
        if not parse_objectives(options.load.goodput):
            raise LoadTestError("objective: what is a good request? (--goodput 'ttft:200 tpot:20')")
        return Objective("goodput.requests_per_s", titles["goodput.requests_per_s"], True)
    try:
        bound = next(bound for bound in parse_bounds([f"{text.replace(' ', '_')}:1"], goodput=False))
    except LoadTestError:
        bound = Bound("errors", 0.0)
    if bound.name == "errors":
        raise LoadTestError(f"objective: {text!r} is none of {', '.join(_RATES)}, goodput, ttft_p99 and the like")
    check_latencies(options.target, [bound.name.partition("_")[0]], "objective")
    return Objective(bound.path, f"{str(bound).partition(' ≤')[0]} ms", False)


class Judgement(NamedTuple):
    score: Score
    misses: list[str]


def judge(report: Report, objective: Objective, bounds: Sequence[Bound]) -> Judgement:
    """Runs whose figures can be used come before others, of those the ones that keep the bounds, of those the best;
    where bounds are broken, the nearest to keeping them."""
    by_bound = margins(report, bounds)
    misses = [miss(report, bound) for bound, reached in by_bound.items() if reached > 1]
    measured = objective.of(report)
    if report.completed and measured is None:
        raise LoadTestError(f"objective: these runs have no {objective.title}")
    usable = float(report.validity.verdict != "invalid")
    if misses or measured is None:
        worst = max(by_bound.values(), default=math.inf)
        return Judgement((usable, 0.0, -worst), misses)
    return Judgement((usable, 1.0, measured if objective.more_is_better else -measured), misses)
