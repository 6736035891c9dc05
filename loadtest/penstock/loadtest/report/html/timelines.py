"""Plots of one report over its time."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.loadtest.report.formatting import number
from penstock.loadtest.report.html.markup import Markup, element
from penstock.loadtest.report.html.plot import BOTTOM, LEFT, RIGHT, TOP, figure, line, x_axis, y_axis
from penstock.loadtest.report.html.scale import Scale, linear
from penstock.loadtest.report.model import Timeline

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
    for index, value in enumerate(values):
        if value is not None:
            if previous is None:
                runs.append([])
            runs[-1].append((index, value))
        previous = value
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
