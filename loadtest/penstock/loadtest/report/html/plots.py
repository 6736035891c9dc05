"""The plots of a page: throughput against latency, how latencies spread, and runs over their time."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.loadtest.metrics import Distribution
from penstock.loadtest.report.describe import title
from penstock.loadtest.report.figures import LATENCIES, load_name, value
from penstock.loadtest.report.formatting import clean, number, percent, plural
from penstock.loadtest.report.histogram import LOWEST_MS, OBJECTIVES, attained, bins
from penstock.loadtest.report.html.plot import (
    BOTTOM,
    LEFT,
    RIGHT,
    TOP,
    Markup,
    Scale,
    element,
    figure,
    line,
    linear,
    logarithmic,
    markers,
    text,
    x_axis,
    y_axis,
)
from penstock.loadtest.report.model import Histogram, Report, Timeline

_FEWEST = 2
"""Slices that make a line."""


def timeline_plots(timeline: Timeline | None) -> list[Markup]:
    if timeline is None or len(timeline.in_flight) < _FEWEST:
        return []
    seconds = timeline.seconds
    plots = []
    if any(timeline.output_tokens_per_s):
        plots.append(_steps("Output tokens/s", timeline.output_tokens_per_s, seconds))
    plots.append(_steps("Requests completed/s", timeline.requests_per_s, seconds))
    plots.append(_steps("Requests in flight", timeline.in_flight, seconds, note="mean of the slice"))
    if any(value is not None for value in timeline.ttft_ms):
        plots.append(_steps("TTFT, ms", timeline.ttft_ms, seconds, note="median, by the slice of the send"))
    if any(timeline.errors):
        plots.append(_errors(timeline.errors, seconds))
    return plots


def _time(count: int, seconds: float) -> Scale:
    return Scale(0.0, count * seconds, LEFT, RIGHT)


def _steps(title: str, values: Sequence[float | None], seconds: float, note: str = "") -> Markup:
    there = [value for value in values if value is not None]
    time, scale = _time(len(values), seconds), linear(max(there), BOTTOM, TOP - 18)
    marks = [*y_axis(scale), *x_axis(time, "s")]
    for run in _unbroken(values):
        points = [(time(i * seconds + step), scale(value)) for i, value in run for step in (0.0, seconds)]
        closed = [(points[0][0], BOTTOM), *points, (points[-1][0], BOTTOM)]
        marks.append(element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in closed), class_="area"))
        marks.append(line(points, "first"))
    described = f"{title} in slices of {seconds:g} s: from {number(min(there))} to {number(max(there))}."
    return figure(title, described, marks, note=note)


def _unbroken(values: Sequence[float | None]) -> list[list[tuple[int, float]]]:
    """Runs of slices that have a value, with their numbers."""
    runs: list[list[tuple[int, float]]] = []
    previous: float | None = None
    for index, sample in enumerate(values):
        if sample is not None:
            if previous is None:
                runs.append([])
            runs[-1].append((index, sample))
        previous = sample
    return runs


def _errors(errors: Sequence[int], seconds: float) -> Markup:
    time, scale = _time(len(errors), seconds), linear(max(errors), BOTTOM, TOP - 18)
    marks = [*y_axis(scale, whole=True), *x_axis(time, "s")]
    width = (RIGHT - LEFT) / len(errors)
    for index, count in enumerate(errors):
        if count:
            top = scale(count)
            marks.append(
                element(
                    "rect", x=time(index * seconds), y=top, width=max(width - 1, 1), height=BOTTOM - top, class_="bad"
                )
            )
    first = next(index for index, count in enumerate(errors) if count)
    note = f"{sum(errors)}, the first after {first * seconds:g} s"
    return figure("Failed requests", f"Failed requests in slices of {seconds:g} s: {note}.", marks, note=note)


_BARS = 44
_PERCENTILES = ("p50", "p90", "p99")


def histogram_plots(report: Report) -> list[Markup]:
    plots = []
    for field, (name, what) in LATENCIES.items():
        distribution: Distribution | None = getattr(report, field)
        if distribution is not None and field in report.histograms:
            plots.append(_histogram(name, what, report.histograms[field], distribution))
    return plots


def _histogram(name: str, what: str, histogram: Histogram, distribution: Distribution) -> Markup:
    low, high = _range(histogram)
    scale = logarithmic(low, high, LEFT, RIGHT)
    bars = _bars(histogram, scale)
    total = sum(bars) or 1.0
    shares = linear(100 * max(bars) / total, BOTTOM, TOP)
    width = (RIGHT - LEFT) / _BARS
    marks = [*y_axis(shares, "%"), *x_axis(scale, "ms")]
    for index, count in enumerate(bars):
        if count:
            top = min(shares(100 * count / total), BOTTOM - 1)
            left = LEFT + index * width
            marks.append(
                element("rect", x=left + 0.5, y=top, width=width - 1, height=BOTTOM - top, rx=1.0, class_="bar")
            )
    values = [(percentile, getattr(distribution, percentile)) for percentile in _PERCENTILES]
    marks += markers([(scale(value), f"{label} {number(value)}") for label, value in values if value > 0], "percentile")
    note = f"{plural(distribution.count, 'value')}"
    if histogram.below:
        note += f", {percent(histogram.below / max(1, histogram.below + sum(histogram.counts)))} under {LOWEST_MS} ms"
    title = ", ".join(f"{label} {number(value)} ms" for label, value in [*values, ("most", distribution.max)])
    return figure(name, f"Histogram of {name} ({what}): {title}.", marks, note=note)


def _range(histogram: Histogram) -> tuple[float, float]:
    """Of what is to be seen: a bin or two is not a plot."""
    ends = [(low, high) for low, high, _ in bins(histogram) if low > 0]
    if not ends:
        return LOWEST_MS, 10 * LOWEST_MS
    return (LOWEST_MS if histogram.below else ends[0][0]), ends[-1][1]


def _bars(histogram: Histogram, scale: Scale) -> list[float]:
    """Fine bins put into bars; one that two bars share is divided between them, so that there are no combs."""
    bars = [0.0] * _BARS
    width = (RIGHT - LEFT) / _BARS
    for low, high, count in bins(histogram):
        left = (scale(max(low, scale.low)) - LEFT) / width
        right = (scale(max(high, scale.low)) - LEFT) / width
        first, last = min(int(left), _BARS - 1), min(int(right), _BARS - 1)
        for index in range(first, last + 1):
            part = min(right, index + 1) - max(left, index)
            bars[index] += count * (part / (right - left) if right > left else 1.0)
    return bars


_BOUNDED = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "E2E", "itl": "Longest gap"}


def attainment_plots(report: Report) -> list[Markup]:
    """For each figure of a request: the share of requests at or under x; bounds of the goodput are marked."""
    objectives = report.goodput.objectives if report.goodput else []
    plots = []
    for objective, name in _BOUNDED.items():
        bounds = [one.milliseconds for one in objectives if one.name == objective]
        histogram = report.histograms.get(OBJECTIVES[objective])
        if histogram is not None and (bounds or objective != "itl"):
            plots.append(_attainment(name, histogram, bounds))
    return plots


def _attainment(name: str, histogram: Histogram, bounds: Sequence[float]) -> Markup:
    low, high = _range(histogram)
    scale = logarithmic(min([low, *bounds]), max([high, *bounds]), LEFT, RIGHT)
    shares = Scale(0.0, 100.0, BOTTOM, TOP)
    total = sum(histogram.counts) + histogram.below + histogram.absent + histogram.failed
    kept = histogram.absent
    points = [(LEFT, shares(100 * kept / total))]
    for lower, upper, count in bins(histogram):
        points.append((scale(max(lower, scale.low)), shares(100 * kept / total)))
        kept += count
        points.append((scale(max(upper, scale.low)), shares(100 * kept / total)))
    points.append((RIGHT, shares(100 * kept / total)))
    reached = [(bound, attained(histogram, bound)) for bound in bounds]
    marks = [*y_axis(shares, "%"), *x_axis(scale, "ms"), line(points, "first")]
    marks += markers([(scale(b), f"≤ {number(b)} ms: {percent(share)}") for b, share in reached], "bound")
    for bound, share in reached:
        marks.append(element("circle", cx=scale(bound), cy=shares(100 * share), r=3.5, class_="point second"))
    note = f"{plural(histogram.failed, 'failed request')} among them" if histogram.failed else ""
    title = "; ".join(f"{percent(share)} within {number(bound)} ms" for bound, share in reached)
    return figure(name, f"Share of requests whose {name} is at most x. {title}", marks, note=note)


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
    for position, (colour, (label, group)) in enumerate(zip(_colours(len(groups)), groups.items(), strict=True), 1):
        places = [(across(value(report, throughput) or 0.0), up(value(report, path) or 0.0)) for report in group]
        marks.append(line(places, colour))
        for (x, y), report in zip(places, group, strict=True):
            title = element("title", f"{label}, {load_name(report.options)}")
            points.append(element("circle", title, cx=x, cy=y, r=3.5, class_=f"point {colour}{_hollow(report)}"))
            labels.add(x, y - 8, str(position) if many else _short(report), colour)
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
