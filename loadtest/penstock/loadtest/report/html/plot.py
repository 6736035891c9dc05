"""The frame that all plots share: title, axes, and marks with labels beside them."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.loadtest.report.html.markup import Markup, element
from penstock.loadtest.report.html.scale import Scale, tick

WIDTH, HEIGHT = 360.0, 210.0
LEFT, RIGHT, TOP, BOTTOM = 42.0, 350.0, 34.0, 180.0
"""Where the plot's area lies; above it is room for two rows of labels, below for the axis."""

_LETTER = 6.4
"""Width of a letter, at most; fonts differ."""


def figure(title: str, description: str, marks: Sequence[Markup], *, note: str = "") -> Markup:
    """`description`: what the plot shows, for those who do not see it."""
    drawing = element(
        "svg",
        element("title", title),
        element("desc", description),
        list(marks),
        viewBox=f"0 0 {WIDTH:g} {HEIGHT:g}",
        role="img",
    )
    caption = element("figcaption", element("b", title), element("span", note) if note else "")
    return element("figure", caption, drawing)


def x_axis(scale: Scale, unit: str) -> list[Markup]:
    marks = [element("line", x1=LEFT, x2=RIGHT, y1=BOTTOM, y2=BOTTOM, class_="axis")]
    free = RIGHT - _LETTER * len(unit) - 6
    for value in scale.ticks():
        place = scale(value)
        marks.append(element("line", x1=place, x2=place, y1=BOTTOM, y2=BOTTOM + 4, class_="axis"))
        if place + _LETTER * len(tick(value)) / 2 <= free:
            marks.append(text(place, BOTTOM + 16, tick(value), anchor="middle"))
    marks.append(text(RIGHT, BOTTOM + 16, unit, anchor="end"))
    return marks


def y_axis(scale: Scale, unit: str = "", *, whole: bool = False) -> list[Markup]:
    """Fine lines across, each with its value; `whole`: for what is counted."""
    marks = []
    for value in scale.ticks(5):
        if whole and value != round(value):
            continue
        place = scale(value)
        if value > scale.low:
            marks.append(element("line", x1=LEFT, x2=RIGHT, y1=place, y2=place, class_="grid"))
        marks.append(text(LEFT - 6, place + 3.5, tick(value) + unit, anchor="end"))
    return marks


def text(x: float, y: float, words: str, *, anchor: str = "start", class_: str = "") -> Markup:
    return element("text", words, x=x, y=y, text_anchor=anchor, class_=class_ or None)


def line(points: Sequence[tuple[float, float]], class_: str) -> Markup:
    return element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=f"line {class_}")


def markers(places: Sequence[tuple[float, str]], class_: str) -> list[Markup]:
    """Upright lines through the plot, labelled above it; labels that would touch move a row up, or are left out."""
    lines, labels = [], []
    rows = [LEFT - 40, LEFT - 40]
    for place, label in sorted(places):
        half = _LETTER * len(label) / 2
        middle = min(max(place, LEFT + half - 30), RIGHT - half + 6)
        row = next((row for row, end in enumerate(rows) if middle - half > end), None)
        height = TOP - 5 - 12 * (row or 0)
        lines.append(element("line", x1=place, x2=place, y1=height + 3, y2=BOTTOM, class_=class_))
        if row is not None:
            rows[row] = middle + half + 4
            labels.append(text(middle, height, label, anchor="middle", class_="label"))
    return lines + labels
