"""A Prometheus summary: a count, a sum, and the quantiles of the last minute."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence

SLICE_NS = 12_000_000_000
SLICES = 5
"""Quantiles are of the last 48 to 60 seconds, as those of Triton's summaries."""

_MANTISSA_BITS = 8


class SlidingSummary:
    """Of whole numbers from 0. Values below 256 are kept as they are, larger ones within 0.4 %.

    Values are counted in bins whose width grows with the value: memory depends on how far values spread, not on how
    many there are, and `observe` costs a bin's index and an addition.
    """

    __slots__ = ("_slices", "count", "sum")

    def __init__(self) -> None:
        self.count = 0
        self.sum = 0
        self._slices: deque[tuple[int, Counter[int]]] = deque(maxlen=SLICES)
        """(number of the slice of time, how many values are in each bin)."""

    def observe(self, value: int, now_ns: int) -> None:
        """`now_ns` must not go backwards."""
        self.count += 1
        self.sum += value
        slices, number = self._slices, now_ns // SLICE_NS
        if not slices or slices[-1][0] != number:
            slices.append((number, Counter()))
        shift = max(0, value.bit_length() - _MANTISSA_BITS)
        slices[-1][1][shift << _MANTISSA_BITS | value >> shift] += 1

    def quantiles(self, shares: Sequence[float], now_ns: int) -> list[float]:
        """For each share the smallest value that so large a share of recent ones does not exceed; NaN without any."""
        oldest = now_ns // SLICE_NS - SLICES
        recent: Counter[int] = Counter()
        for number, counts in self._slices:
            if number > oldest:
                recent.update(counts)
        bins, total = sorted(recent.items()), recent.total()
        return [_at_rank(bins, max(1, math.ceil(share * total))) for share in shares]


def _at_rank(bins: Sequence[tuple[int, int]], rank: int) -> float:
    """The middle of the bin that holds the value of this rank, from 1."""
    for index, count in bins:
        rank -= count
        if rank <= 0:
            shift = index >> _MANTISSA_BITS
            return ((index & ((1 << _MANTISSA_BITS) - 1)) << shift) + ((1 << shift) >> 1)
    return math.nan
