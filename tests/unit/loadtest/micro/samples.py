"""Results made by hand."""

from __future__ import annotations

from penstock.loadtest.micro.measure import Rounds
from penstock.loadtest.micro.results import ExtraInfo, Result, result
from penstock.loadtest.micro.stats import summary


def made(*seconds: float, name: str = "blocks/hash", instructions: float | None = None, others: float = 0.0) -> Result:
    return result(name, ExtraInfo("block", instructions, others), summary(Rounds(list(seconds), 100)), 1.0)
