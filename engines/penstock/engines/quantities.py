"""Sizes and durations as people write them: 10GiB, 30s, 1h30m."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Literal

TimeUnit = Literal["ns", "us", "ms", "s"]
"""In which a setting counts, and in which it is meant where a text has no unit."""

_SIZES = {"": 1, "B": 1}
_SIZES |= {f"{prefix}{end}": 1000**power for power, prefix in enumerate("KMGT", 1) for end in ("", "B")}
_SIZES |= {f"{prefix}{end}": 1024**power for power, prefix in enumerate("KMGT", 1) for end in ("I", "IB")}
"""Bytes of each unit, in capitals. `4G` and `4Gi` are Kubernetes' for 4GB and 4GiB."""
_SIZE = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)", re.ASCII)
_TIMES = {"ns": 1, "us": 10**3, "µs": 10**3, "ms": 10**6, "s": 10**9}
_TIMES |= {"m": 60 * 10**9, "h": 3600 * 10**9, "d": 86_400 * 10**9}
"""Nanoseconds of each unit."""
_PART = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)\s*(ns|us|µs|ms|s|m|h|d)\s*", re.ASCII)
_DURATION = re.compile(f"(?:{_PART.pattern})+", re.ASCII)
_NAMES = {"ns": "nanoseconds", "us": "microseconds", "ms": "milliseconds", "s": "seconds"}


def parse_size(text: str) -> int:
    """Bytes in "4GiB", "500 MB", "4Gi" or "1073741824". Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    unit = None if match is None else _SIZES.get(match[2].upper())
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size such as 10GiB, 500MB, or a number of bytes")
    return int(Decimal(match[1]) * unit)


def parse_duration(text: str, unit: TimeUnit = "s") -> float:
    """How many of `unit` there are in "30s", "500ms", "1h30m", or in a number without a unit. Raises ValueError."""
    stripped = text.strip()
    if _DURATION.fullmatch(stripped):
        whole = sum(Decimal(number) * _TIMES[suffix] for number, suffix in _PART.findall(stripped))
        return float(whole / _TIMES[unit])
    try:
        return float(stripped)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a duration such as 500ms, 30s, 5m, 1h30m, or a number of {_NAMES[unit]}"
        ) from None


def size_text(size: int) -> str:
    """As `parse_size` reads it, in the largest unit of which it is a whole number: "10GiB"."""
    for unit in ("TiB", "GiB", "MiB"):
        if size and size % _SIZES[unit.upper()] == 0:
            return f"{size // _SIZES[unit.upper()]}{unit}"
    return str(size)


def duration_text(number: float, unit: TimeUnit) -> str:
    """As `parse_duration` reads it, in the largest unit of which it is a whole number: "30d", "200ms"."""
    nanoseconds = Decimal(repr(number)) * _TIMES[unit]
    for suffix in ("d", "h", "m", "s", "ms", "us", "ns"):
        if nanoseconds and nanoseconds % _TIMES[suffix] == 0:
            return f"{int(nanoseconds // _TIMES[suffix])}{suffix}"
    return f"{number:g}"
