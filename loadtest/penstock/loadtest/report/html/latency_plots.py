"""Plots of one report's latencies: how they spread, and what share of the requests keeps a bound."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.loadtest.metrics import Distribution
from penstock.loadtest.report.figures import LATENCIES
from penstock.loadtest.report.formatting import number, percent, plural
from penstock.loadtest.report.histogram import LOWEST_MS, OBJECTIVES, attained, bins
from penstock.loadtest.report.html.markup import Markup, element
from penstock.loadtest.report.html.plot import BOTTOM, LEFT, RIGHT, TOP, figure, line, markers, x_axis, y_axis
from penstock.loadtest.report.html.scale import Scale, linear, logarithmic
from penstock.loadtest.report.model import Histogram, Report

_BARS = 44
_PERCENTILES = ("p50", "p90", "p99")


def histogram_plots(report: Report) -> list[Markup]:
    found = []
    for field, (name, what) in LATENCIES.items():
        distribution: Distribution | None = getattr(report, field)
        if distribution is not None and field in report.histograms:
            found.append(_histogram(name, what, report.histograms[field], distribution))
    return found


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
    told = ", ".join(f"{label} {number(value)} ms" for label, value in [*values, ("most", distribution.max)])
    return figure(name, f"Histogram of {name} ({what}): {told}.", marks, note=note)


def _range(histogram: Histogram) -> tuple[float, float]:
    """Of what is to be seen: a bin or two is not a plot."""
    found = [(low, high) for low, high, _ in bins(histogram) if low > 0]
    if not found:
        return LOWEST_MS, 10 * LOWEST_MS
    return (LOWEST_MS if histogram.below else found[0][0]), found[-1][1]


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
    found = []
    for objective, name in _BOUNDED.items():
        bounds = [one.milliseconds for one in objectives if one.name == objective]
        histogram = report.histograms.get(OBJECTIVES[objective])
        if histogram is not None and (bounds or objective != "itl"):
            found.append(_attainment(name, histogram, bounds))
    return found


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
    told = "; ".join(f"{percent(share)} within {number(bound)} ms" for bound, share in reached)
    return figure(name, f"Share of requests whose {name} is at most x. {told}", marks, note=note)
