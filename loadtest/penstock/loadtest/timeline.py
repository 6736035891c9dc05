"""A run in slices: what it was like over time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from penstock.loadtest.errors import INTERRUPTED
from penstock.loadtest.messages import Sample
from penstock.loadtest.report.model import Timeline

_SLICES = 60
_STEPS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Lengths of a slice that people can read an axis by."""


def timeline(samples: Sequence[Sample]) -> Timeline | None:
    """At most about 60 slices; None for a run without samples."""
    end = max((sample.ended for sample in samples), default=0.0)
    if end <= 0:
        return None
    seconds = next((step for step in _STEPS if end / step <= _SLICES), _STEPS[-1])
    count = int(end / seconds) + 1
    tokens, done, errors, busy = [0.0] * count, [0.0] * count, [0] * count, [0.0] * count
    ttfts: list[list[float]] = [[] for _ in range(count)]

    def slot(time: float) -> int:
        return min(count - 1, max(0, int(time / seconds)))

    for sample in samples:
        for index in range(slot(sample.sent), slot(sample.ended) + 1):
            busy[index] += max(0.0, min(sample.ended, (index + 1) * seconds) - max(sample.sent, index * seconds))
        if sample.error:
            errors[slot(sample.ended)] += sample.error != INTERRUPTED
            continue
        arrivals = sample.arrivals or [sample.ended]
        for arrival in arrivals:
            tokens[slot(arrival)] += sample.tokens / len(arrivals)
        done[slot(sample.ended)] += 1
        if sample.arrivals:
            ttfts[slot(sample.sent)].append(sample.arrivals[0] - sample.sent)
    return Timeline(
        seconds=seconds,
        output_tokens_per_s=[round(value / seconds, 2) for value in tokens],
        requests_per_s=[round(value / seconds, 3) for value in done],
        in_flight=[round(value / seconds, 2) for value in busy],
        ttft_ms=[round(statistics.median(values) * 1e3, 3) if values else None for values in ttfts],
        errors=errors,
    )
