"""Latencies counted in bins: small enough for a report, exact enough for its curves (1 %)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from penstock.loadtest.errors import INTERRUPTED
from penstock.loadtest.latency import gaps, latencies
from penstock.loadtest.messages import Sample
from penstock.loadtest.report.model import Histogram

LOWEST_MS = 0.01
_STEP = math.log(1.01)


def edge(number: int) -> float:
    """The lower end of a bin, in milliseconds; its upper end is the next bin's lower."""
    return LOWEST_MS * math.exp(_STEP * number)


def bins(histogram: Histogram) -> Iterator[tuple[float, float, int]]:
    """Lower end, upper end (milliseconds) and count of each bin that holds something, upwards; `below` from 0 on."""
    if histogram.below:
        yield 0.0, LOWEST_MS, histogram.below
    for number, count in enumerate(histogram.counts, histogram.first):
        if count:
            yield edge(number), edge(number + 1), count


class Tally:
    """A histogram that grows."""

    def __init__(self) -> None:
        self.count = 0
        self._counts: Counter[int] = Counter()
        self._below = 0

    def add(self, seconds: Iterable[float]) -> None:
        values = np.fromiter(seconds, np.float64) * 1e3
        values = values[~np.isnan(values)]
        high = values[values >= LOWEST_MS]
        self.count += len(values)
        self._below += len(values) - len(high)
        numbers, counts = np.unique(np.floor(np.log(high / LOWEST_MS) / _STEP).astype(int), return_counts=True)
        self._counts.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))

    def quantile(self, share: float) -> float | None:
        """Milliseconds, within 1 %; None while there is nothing."""
        rank = share * (self.count - 1)
        seen = self._below
        if not self.count:
            return None
        if rank < seen:
            return 0.0
        for number in sorted(self._counts):
            seen += self._counts[number]
            if rank < seen:
                return edge(number) * math.exp(_STEP / 2)
        return None

    def histogram(self, *, absent: int = 0, failed: int = 0) -> Histogram:
        first = min(self._counts, default=0)
        counts = [self._counts[number] for number in range(first, max(self._counts, default=-1) + 1)]
        return Histogram(first=first, counts=counts, below=self._below, absent=absent, failed=failed)


def histograms(samples: Sequence[Sample], *, open_loop: bool) -> dict[str, Histogram]:
    """Under the names of the report's latencies, those that there are; and the longest gap of each request."""
    counted = [sample for sample in samples if sample.error != INTERRUPTED]
    good = [sample for sample in counted if not sample.error]
    failed = len(counted) - len(good)
    measured = [latencies(sample, from_intended=open_loop) for sample in good]
    values = {
        "ttft_ms": _of_requests([one.ttft for one in measured], failed),
        "itl_ms": _of([gap for sample in good for gap in gaps(sample)]),
        "tpot_ms": _of_requests([one.tpot for one in measured], failed),
        "e2e_ms": _of_requests([one.e2e for one in measured], failed),
        "longest_gap_ms": _of_requests([one.itl for one in measured], failed),
    }
    return {name: histogram for name, histogram in values.items() if histogram is not None}


OBJECTIVES = {"ttft": "ttft_ms", "tpot": "tpot_ms", "itl": "longest_gap_ms", "e2e": "e2e_ms"}
"""The histogram that each objective bounds."""


def _of_requests(values: Sequence[float | None], failed: int) -> Histogram | None:
    there = [value for value in values if value is not None]
    return _of(there, absent=len(values) - len(there), failed=failed)


def _of(seconds: Sequence[float], *, absent: int = 0, failed: int = 0) -> Histogram | None:
    if not seconds:
        return None
    tally = Tally()
    tally.add(seconds)
    return tally.histogram(absent=absent, failed=failed)


def attained(histogram: Histogram, milliseconds: float) -> float:
    """The share of requests that keep a bound. Failed ones do not; those without such a figure do."""
    kept = float(histogram.absent)
    total = histogram.absent + histogram.failed
    for low, high, count in bins(histogram):
        total += count
        if high <= milliseconds:
            kept += count
        elif low < milliseconds:
            kept += count * (milliseconds - low) / (high - low)
    return kept / total if total else 0.0
