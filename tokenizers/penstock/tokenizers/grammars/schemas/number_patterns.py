"""Regular expressions for the numbers between two whole numbers of any length, as JSON writes them."""

from __future__ import annotations

from typing import NamedTuple

_ANY = "(?:0|[1-9][0-9]*)"
_FRACTION = r"(?:\.[0-9]+)?"
_NO_FRACTION = r"(?:\.0+)?"


class Bound(NamedTuple):
    value: int
    excluded: bool = False


def integers_between(low: int | None, high: int | None) -> str | None:
    """Both included; None has no bound. None: there are no such integers."""
    parts = []
    if low is None or low < 0:
        digits = _digits(1 if high is None else max(1, -high), None if low is None else -low)
        parts += [] if digits is None else [f"-{digits}"]
    if high is None or high >= 0:
        digits = _digits(0 if low is None else max(0, low), high)
        parts += [] if digits is None else [digits]
    return _either(parts) if parts else None


def numbers_between(low: Bound | None, high: Bound | None) -> str | None:
    """With fractions, and without exponents. None has no bound. None: there are no such numbers."""
    parts = []
    if low is None or low.value < 0:
        least = Bound(0, excluded=True) if high is None or high.value >= 0 else Bound(-high.value, high.excluded)
        part = _magnitudes(least, None if low is None else Bound(-low.value, low.excluded))
        parts += [] if part is None else [f"-{part}"]
    if high is None or high.value >= 0:
        part = _magnitudes(Bound(0) if low is None or low.value < 0 else low, high)
        parts += [] if part is None else [part]
    return _either(parts) if parts else None


def _magnitudes(low: Bound, high: Bound | None) -> str | None:
    """Of numbers that are not negative."""
    parts = []
    whole = _digits(low.value + low.excluded, None if high is None else high.value - 1)
    if whole is not None:
        parts.append(whole + _FRACTION)
    if low.excluded and (high is None or low.value < high.value):
        parts.append(rf"{low.value}\.[0-9]*[1-9][0-9]*")
    if high is not None and not high.excluded and (low.value < high.value or low == high):
        parts.append(f"{high.value}{_NO_FRACTION}")
    return _either(parts) if parts else None


def _digits(low: int, high: int | None) -> str | None:
    """Of no less than `low`, which is not negative, without zeros in front."""
    if high is None:
        return (
            _ANY
            if low == 0
            else _either([_of_length(str(low), "9" * len(str(low))), f"[1-9][0-9]{{{len(str(low))},}}"])
        )
    if low > high:
        return None
    short, long = len(str(low)), len(str(high))
    if short == long:
        return _of_length(str(low), str(high))
    between = [f"[1-9][0-9]{{{short},{long - 2}}}"] if long - short > 1 else []
    return _either([_of_length(str(low), "9" * short), *between, _of_length("1" + "0" * (long - 1), str(high))])


def _of_length(low: str, high: str) -> str:
    """Of as many digits as both have."""
    if not low:
        return ""
    rest = len(low) - 1
    if set(low) == {"0"} and set(high) == {"9"}:
        return _any_digits(len(low))
    if low[0] == high[0]:
        return low[0] + _of_length(low[1:], high[1:])
    parts, first, last = [], int(low[0]), int(high[0])
    if low[1:] != "0" * rest:
        parts.append(low[0] + _of_length(low[1:], "9" * rest))
        first += 1
    if high[1:] != "9" * rest:
        parts.append(high[0] + _of_length("0" * rest, high[1:]))
        last -= 1
    if first <= last:
        digit = str(first) if first == last else f"[{first}-{last}]"
        parts.append(digit + _any_digits(rest))
    return _either(parts)


def _any_digits(count: int) -> str:
    return "" if count == 0 else "[0-9]" if count == 1 else f"[0-9]{{{count}}}"


def _either(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"(?:{'|'.join(parts)})"
