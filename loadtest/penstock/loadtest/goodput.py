"""Service level objectives: which requests were good."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.latency import Latencies

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
    found = []
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
        found.append(Objective(name, value))
    return found


def is_good(latencies: Latencies, objectives: Sequence[Objective]) -> bool:
    return all(objective.holds(latencies) for objective in objectives)
