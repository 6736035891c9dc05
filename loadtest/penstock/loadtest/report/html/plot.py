"""The frame of a plot: axes, title, marks with labels, and elements of HTML and SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from penstock.loadtest.report.formatting import clean


class Markup(str):
    """Text that is markup already."""

    __slots__ = ()


Content = str | Markup


def element(name: str, /, *content: Content | Sequence[Content], **attributes: str | float | None) -> Markup:
    """Content that is not Markup is escaped. `class_` and `stroke_width` become class and stroke-width; None is left
    out; numbers are written with two digits."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    inner = "".join(join(part) for part in content)
    return Markup(f"<{name}{written}/>" if name in _EMPTY else f"<{name}{written}>{inner}</{name}>")


_EMPTY = {"line", "rect", "polyline", "meta"}


def join(content: Content | Sequence[Content]) -> Markup:
    if isinstance(content, Markup):
        return content
    if isinstance(content, str):
        return Markup(escape(clean(content, longest=_LONGEST), quote=True))
    return Markup("".join(join(part) for part in content))


_LONGEST = 10_000


def _attribute(value: str | float) -> str:
    if isinstance(value, str):
        return escape(value, quote=True)
    return f"{value:.2f}".rstrip("0").rstrip(".")


def table(
    head: Sequence[Content],
    rows: Sequence[Sequence[Content]],
    *,
    numbers: bool = True,
    right: Sequence[bool] | None = None,
) -> Markup:
    """`numbers`: columns after the first are aligned right; or `right` says of each column whether it is."""
    columns = len(head or rows[0]) if head or rows else 0
    classes = ["number" if is_right else None for is_right in right or [False] * columns]
    cells = [element("th", cell, scope="col", class_=kind) for cell, kind in zip(head, classes, strict=False)]
    cells = [element("tr", cells)] if any(head) else []
    body = [
        element(
            "tr",
            element("th", row[0], scope="row"),
            [element("td", cell, class_=kind) for cell, kind in zip(row[1:], classes[1:], strict=True)],
        )
        for row in rows
    ]
    inner = [element("thead", cells)] if cells else []
    kind = "mixed" if right is not None else "numbers" if numbers else "texts"
    whole = element("table", [*inner, element("tbody", body)], class_=kind)
    return element("div", whole, class_="scroll", tabindex="0")


_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
_DECADES = ((1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0), (1.0, 2.0, 3.0, 5.0), (1.0, 2.0, 5.0), (1.0, 3.0), (1.0,))
"""What is marked of each power of ten, from much to little."""


class Scale(NamedTuple):
    """Linear, or logarithmic."""

    low: float
    high: float
    start: float
    end: float
    """Places of low and high; may fall."""
    log: bool = False

    def __call__(self, value: float) -> float:
        value = min(max(value, self.low), self.high)
        if self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        if self.log and self.high / self.low >= 4:
            return _log_ticks(self.low, self.high, most)
        return _linear_ticks(self.low, self.high, most)


def linear(high: float, start: float, end: float, low: float = 0.0) -> Scale:
    """With a little room above `high`."""
    return Scale(low, low + 1.04 * max(high - low, 1e-9), start, end)


def logarithmic(low: float, high: float, start: float, end: float) -> Scale:
    """Room on both sides, and for at least 20 % from end to end."""
    low, high = low / 1.03, high * 1.03
    if high / low < 1.2:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(1.2), middle * math.sqrt(1.2)
    return Scale(low, high, start, end, log=True)


def _step(span: float, count: int) -> float:
    rough = span / count
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in _STEPS if step * power >= rough * (1 - 1e-9))


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    step = _step(high - low, most - 1)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 10) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in _DECADES:
        values = [factor * 10.0**decade for decade in decades for factor in factors]
        ticks = [tick for tick in values if low <= tick <= high]
        if len(ticks) <= most:
            return ticks
    return ticks[:: -(-len(ticks) // most)]


def tick(value: float) -> str:
    """Short: 1.5k, 20, 0.05."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:g}"


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
