"""The forms of numbers in reports, and of texts that came from elsewhere."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]+")
_LONGEST = 300


def clean(text: str, *, longest: int = _LONGEST) -> str:
    """On one line, without what moves a terminal's cursor or turns the direction of writing; shortened."""
    plain = _CONTROL.sub(" ", text).strip()
    return plain if len(plain) <= longest else plain[: longest - 1] + "…"


def number(value: float | None) -> str:
    """About three digits, whole numbers whole, thousands apart; – for None."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    size = abs(value)
    if size >= 1e9:
        return f"{value / 1e9:,.1f} G"
    if size >= 99.95 or size == 0:
        return f"{value:,.0f}"
    if size >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.9995 else f"{value:.3f}"


def duration(milliseconds: float | None) -> str:
    """With its unit: `12.3 ms`, `1.5 s`."""
    if milliseconds is None:
        return "–"
    if abs(milliseconds) >= 1e4:
        return f"{number(milliseconds / 1e3)} s"
    return f"{number(milliseconds)} ms"


def percent(share: float) -> str:
    """Never rounded to 100 % while something is missing, nor to 0 % while there is something."""
    text = f"{100 * share:.1f}"
    if share < 1 and text == "100.0":
        return "> 99.9 %"
    if share > 0 and text == "0.0":
        return "< 0.1 %"
    return f"{text.removesuffix('.0')} %"


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
