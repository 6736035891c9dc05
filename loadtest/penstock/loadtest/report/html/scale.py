"""Axes: from values to places, and the values at which people read them."""

from __future__ import annotations

import math
from typing import NamedTuple

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
        found = [factor * 10.0**decade for decade in decades for factor in factors]
        ticks = [tick for tick in found if low <= tick <= high]
        if len(ticks) <= most:
            return ticks
    return ticks[:: -(-len(ticks) // most)]


def tick(value: float) -> str:
    """Short: 1.5k, 20, 0.05."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:g}"
