"""The latencies of one request, and the objectives that they keep or miss."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from penstock.loadtest.errors import LoadTestError
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


_NAMES = ("ttft", "tpot", "itl", "e2e")


class Objective(msgspec.Struct, frozen=True):
    """A bound that each good request keeps, in milliseconds."""

    name: str
    """ttft, tpot, e2e, or itl: the longest gap of the request."""
    milliseconds: float

    def holds(self, latencies: Latencies) -> bool:
        """A request without this figure (one token has no TPOT) keeps it."""
        value = getattr(latencies, self.name)
        return value is None or 1e3 * value <= self.milliseconds


def parse_objectives(texts: Sequence[str]) -> list[Objective]:
    """From `ttft:200`; several may stand in one text, with spaces between. Raises LoadTestError."""
    objectives = []
    for text in (part for several in texts for part in several.split()):
        name, _, number = text.partition(":")
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if name not in _NAMES or value <= 0:
            raise LoadTestError(
                f"goodput: {text!r} is not a bound in milliseconds such as ttft:200 ({', '.join(_NAMES)})"
            )
        objectives.append(Objective(name, value))
    return objectives


def is_good(latencies: Latencies, objectives: Sequence[Objective]) -> bool:
    return all(objective.holds(latencies) for objective in objectives)
