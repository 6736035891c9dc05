"""Elements of HTML and SVG, escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

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
