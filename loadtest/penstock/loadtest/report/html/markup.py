"""Elements of HTML and SVG, escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from penstock.loadtest.report.words import clean


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


def table(head: Sequence[Content], rows: Sequence[Sequence[Content]], *, numbers: bool = True) -> Markup:
    """`numbers`: columns after the first are aligned right."""
    cells = [element("tr", [element("th", cell, scope="col") for cell in head])] if any(head) else []
    body = [
        element("tr", element("th", row[0], scope="row"), [element("td", cell) for cell in row[1:]]) for row in rows
    ]
    inner = [element("thead", cells)] if cells else []
    whole = element("table", [*inner, element("tbody", body)], class_="numbers" if numbers else "texts")
    return element("div", whole, class_="scroll", tabindex="0")
