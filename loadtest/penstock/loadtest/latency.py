"""The latencies of one request. Some tools give these names to other things: docs/loadtest.md compares."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

from penstock.loadtest.messages import Sample


class Latencies(NamedTuple):
    """Seconds; None where the request has no such figure."""

    ttft: float | None
    """Time to first token: from the start to the first piece of output."""
    tpot: float | None
    """Time per output token after the first: (last piece - first piece) / (tokens - tokens of the first piece)."""
    itl: float | None
    """The longest gap between two pieces."""
    e2e: float
    """From the start to the end of the answer."""


def latencies(sample: Sample, *, from_intended: bool) -> Latencies:
    """`from_intended`: the start is when the request was due, else when it was sent."""
    start = sample.intended if from_intended else sample.sent
    arrivals = sample.arrivals
    streamed = len(arrivals) > 1
    first = sample.pieces[0] if sample.pieces else 1
    rest = sample.tokens - first
    return Latencies(
        ttft=arrivals[0] - start if arrivals else None,
        tpot=(arrivals[-1] - arrivals[0]) / rest if streamed and rest > 0 else None,
        itl=max(gaps(sample)) if streamed else None,
        e2e=sample.ended - start,
    )


def gaps(sample: Sample) -> list[float]:
    """Inter-token latencies: seconds between consecutive pieces of output."""
    return [later - earlier for earlier, later in pairwise(sample.arrivals)]
