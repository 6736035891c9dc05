"""Results made by hand."""

from __future__ import annotations

from benchmarks.micro.measure import Rounds
from benchmarks.micro.results import ExtraInfo, Result, result
from benchmarks.micro.stats import summary


def made(*seconds: float, name: str = "blocks/hash", instructions: float | None = None, others: float = 0.0) -> Result:
    return result(name, ExtraInfo("block", instructions, others), summary(Rounds(list(seconds), 100)), 1.0)
