"""Two servers, measured in turn with the same load: what differs, and whether it is more than chance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from math import sqrt
from urllib.parse import urlsplit

from msgspec.structs import replace

from penstock.loadtest.compare import warnings
from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.options import Options, SearchOptions
from penstock.loadtest.repeats import student95
from penstock.loadtest.report.figures import COMPARED, Figure, value
from penstock.loadtest.report.formatting import number
from penstock.loadtest.report.model import Report
from penstock.loadtest.search.model import Difference, VersusReport
from penstock.loadtest.search.runs import BY_USER, Runner, merge, of_round

DEFAULT_REPEATS = 4
SAME = "no difference seen"


def run_versus(options: Options, run: Runner) -> VersusReport:
    """A and B, then B and A, and so on: what drifts over time touches both alike. In each pair both get the same
    requests; where it is one server under two models or settings, others, which its prefix cache does not know. Ended
    early, there is a report of the complete pairs; without any, raises LoadTestError or KeyboardInterrupt."""
    both = _both(options)
    repeats = options.load.repeat
    apart = repeats if len({_address(side.target.url) for side in both}) == 1 else 0
    pairs: list[tuple[Report, Report]] = []
    order, ended = "", ""
    try:
        for nth in range(repeats):
            places = (0, 1) if nth % 2 == 0 else (1, 0)
            reports: dict[int, Report] = {}
            for place in places:
                text = f"run {len(order) + 1} of {2 * repeats}: {both[place].output.label}"
                reports[place] = run(of_round(both[place], nth + place * apart), text).report
                order += "AB"[place]
            pairs.append((reports[0], reports[1]))
    except (KeyboardInterrupt, LoadTestError) as error:
        if not pairs:
            raise
        ended = str(error) or BY_USER
    a, b = (merge([pair[place] for pair in pairs], both[place]) for place in (0, 1))
    return VersusReport(
        date=a.date,
        command=a.command,
        a=a,
        b=b,
        order=order,
        differences=differences(pairs),
        notes=[*warnings([a, b]), *_without_ratio(pairs)],
        ended_early=ended,
    )


def _address(url: str) -> str:
    """However it is written: with a scheme or without, with the path of an API or without."""
    return urlsplit(url if "//" in url else f"//{url}").netloc.lower()


def _both(options: Options) -> tuple[Options, Options]:
    """The settings of either server's runs."""
    search, target, output = options.search, options.target, options.output
    if search.vs is None:
        raise LoadTestError("vs: which other server?")
    other = replace(
        target,
        url=search.vs,
        model=search.vs_model or target.model,
        extra=target.extra if search.vs_extra is None else search.vs_extra,
        api_key=search.vs_api_key or target.api_key,
    )
    labels = output.label or target.url, search.vs_label or search.vs
    if labels[0] == labels[1]:
        labels = f"{labels[0]} (A)", f"{labels[1]} (B)"
    a = replace(options, search=SearchOptions(), output=replace(output, label=labels[0]))
    load = options.load if options.load.metrics_url in (None, "none") else replace(options.load, metrics_url=None)
    return a, replace(a, target=other, load=load, output=replace(output, label=labels[1]))


def differences(pairs: Sequence[tuple[Report, Report]]) -> list[Difference]:
    """Of the figures that all runs have, and that are above 0."""
    rows = []
    for figure in COMPARED:
        values = [(value(a, figure.path), value(b, figure.path)) for a, b in pairs]
        there = [(a, b) for a, b in values if a and b]
        if len(there) == len(pairs):
            rows.append(difference(figure, there))
    return rows


def _without_ratio(pairs: Sequence[tuple[Report, Report]]) -> list[str]:
    """The figures that are 0 in some run, and so in no table."""
    notes = []
    for figure in COMPARED:
        sides = [[value(pair[place], figure.path) for pair in pairs] for place in (0, 1)]
        runs = [measured for side in sides for measured in side]
        if any(runs) and 0.0 in runs:
            a, b = (number(statistics.fmean(measured or 0.0 for measured in side)) for side in sides)
            notes.append(f"{figure.title}: 0 in some run, which makes no ratio; on average A {a}, B {b}")
    return notes


def difference(figure: Figure, pairs: Sequence[tuple[float, float]]) -> Difference:
    """Of pairs (A, B): Student's interval of the mean of log(B / A), so that A / B has the inverse of it. Pairs keep
    what both runs of a round have in common, their requests and the state of the machine, out of the spread."""
    logs = [math.log(b / a) for a, b in pairs]
    middle = statistics.fmean(logs)
    low = high = None
    if len(logs) > 1:
        half = student95(len(logs) - 1) * statistics.stdev(logs) / sqrt(len(logs))
        low, high = math.exp(middle - half), math.exp(middle + half)
    return Difference(
        figure=figure.path,
        a=statistics.geometric_mean([a for a, _ in pairs]),
        b=statistics.geometric_mean([b for _, b in pairs]),
        ratio=math.exp(middle),
        low=low,
        high=high,
        verdict="" if low is None or high is None else _verdict(figure, low, high),
    )


def _verdict(figure: Figure, low: float, high: float) -> str:
    if low <= 1 <= high:
        return SAME
    good = (low > 1) == figure.more_is_better
    if figure.path == "goodput.share":
        return "better" if good else "worse"
    return "faster" if good else "slower"
