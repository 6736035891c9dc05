"""Throughput against latency, over several reports: a sweep, or two servers side by side."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.loadtest.report.describe import title
from penstock.loadtest.report.figures import LATENCIES, load_name, value
from penstock.loadtest.report.formatting import clean
from penstock.loadtest.report.html.markup import Markup, element
from penstock.loadtest.report.html.plot import BOTTOM, LEFT, RIGHT, TOP, figure, line, text, x_axis, y_axis
from penstock.loadtest.report.html.scale import linear
from penstock.loadtest.report.model import Report

COLOURS = ("first", "second", "third", "fourth")
_FIELDS = ("ttft_ms", "tpot_ms", "e2e_ms")
_ROOM = 1.06
"""Beside the last point, for its label."""


def series(reports: Sequence[Report]) -> dict[str, list[Report]]:
    """By label, in the order given; each by rising load."""
    groups: dict[str, list[Report]] = {}
    for report in reports:
        groups.setdefault(title(report), []).append(report)
    return {label: sorted(group, key=_load) for label, group in groups.items()}


def _load(report: Report) -> float:
    load = report.options.load
    return float(load.concurrency) if load.rate is None else load.rate


def curves(reports: Sequence[Report]) -> list[Markup]:
    """Plots of the medians, then of the 99th percentiles, of what at least two runs have."""
    throughput, unit = _throughput(reports)
    plots = []
    for statistic in ("p50", "p99"):
        for field in _FIELDS:
            shown = [report for report in reports if value(report, f"{field}.{statistic}") is not None]
            if len(shown) > 1:
                plots.append(_curve(shown, field, statistic, throughput, unit))
    return plots


def _throughput(reports: Sequence[Report]) -> tuple[str, str]:
    if any(report.output_tokens_per_s for report in reports):
        return "output_tokens_per_s", "tokens/s"
    return "requests_per_s", "requests/s"


def _curve(reports: Sequence[Report], field: str, statistic: str, throughput: str, unit: str) -> Markup:
    name = f"{LATENCIES[field][0]} {statistic}"
    path = f"{field}.{statistic}"
    across = linear(_ROOM * max(value(report, throughput) or 0.0 for report in reports), LEFT, RIGHT)
    up = linear(max(value(report, path) or 0.0 for report in reports), BOTTOM, TOP - 6)
    marks = [*y_axis(up), *x_axis(across, unit)]
    groups = series(reports)
    points, labels = [], _Labels()
    many = len(groups) > len(COLOURS)
    for number, (colour, (label, group)) in enumerate(zip(_colours(len(groups)), groups.items(), strict=True), 1):
        places = [(across(value(report, throughput) or 0.0), up(value(report, path) or 0.0)) for report in group]
        marks.append(line(places, colour))
        for (x, y), report in zip(places, group, strict=True):
            told = element("title", f"{label}, {load_name(report.options)}")
            points.append(element("circle", told, cx=x, cy=y, r=3.5, class_=f"point {colour}{_hollow(report)}"))
            labels.add(x, y - 8, str(number) if many else _short(report), colour)
    marks += points + labels.marks
    described = f"{name} against throughput: {', '.join(clean(label) for label in groups)}; {len(reports)} runs."
    return figure(f"{name}, ms", described, marks, note=f"against {unit}")


class _Labels:
    """Beside points; one that would cover another is left out, its point tells by itself when pointed at."""

    def __init__(self) -> None:
        self.marks: list[Markup] = []
        self._taken: list[tuple[float, float]] = []

    def add(self, x: float, y: float, words: str, colour: str) -> None:
        if all(abs(x - other_x) > 22 or abs(y - other_y) > 11 for other_x, other_y in self._taken):
            self._taken.append((x, y))
            self.marks.append(text(x, y, words, anchor="middle", class_=f"label {colour}"))


def _colours(count: int) -> list[str]:
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def legend(reports: Sequence[Report]) -> Markup:
    """Where there are more labels than colours they have numbers, which stand beside the points instead of the load."""
    groups = series(reports)
    if len(groups) < 2:
        return Markup("")
    many = len(groups) > len(COLOURS)
    keys = [
        element("li", element("i", class_=f"key {colour}"), f"{number}: {label}" if many else label)
        for number, (colour, label) in enumerate(zip(_colours(len(groups)), groups, strict=True), 1)
    ]
    return element("ul", keys, class_="legend")


def _hollow(report: Report) -> str:
    return " hollow" if report.validity.verdict == "invalid" else ""


def _short(report: Report) -> str:
    load = report.options.load
    return f"c{load.concurrency}" if load.rate is None else f"{load.rate:g}/s"
