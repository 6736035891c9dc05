"""Two results of one benchmark, and whether they differ by more than noise."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.micro.results import Result
from benchmarks.micro.stats import Stats

LEAST_NOISE = 0.05
"""Of times: what the same code differs by from process to process on a quiet machine."""
BUSY = 0.1
"""Share of the machine that others may use: sharing a core or its caches may double every time."""
COUNT_NOISE = 0.02
"""Of instruction counts: where objects happen to lie in memory decides how often a pool of memory is set up."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Now / earlier: above 1 is slower, or more."""

    time: float
    """Ratio of the medians."""
    time_verdict: str
    instructions: float | None
    """None unless both were counted."""
    instructions_verdict: str


def compare(now: Result, earlier: Result) -> Comparison:
    """Times differ when both the medians and the minima do, in the same direction, by more than the larger of
    LEAST_NOISE and the two runs' spreads (IQR / median): neighbours on a machine only ever add time, so that a
    difference that the quickest rounds do not have is theirs. Times from a busy machine say nothing."""
    median, least = now.stats.median / earlier.stats.median, now.stats.min / earlier.stats.min
    noise = max(LEAST_NOISE, _spread(now.stats), _spread(earlier.stats))
    low, high = sorted((median, least))
    busy = max(now.extra_info.others, earlier.extra_info.others) > BUSY
    verdict = "busy machine" if busy else _verdict(low, high, noise, "slower", "faster")
    counts = now.extra_info.instructions, earlier.extra_info.instructions
    if counts[0] is None or not counts[1]:
        return Comparison(median, verdict, None, "")
    ratio = counts[0] / counts[1]
    return Comparison(median, verdict, ratio, _verdict(ratio, ratio, COUNT_NOISE, "more", "fewer"))


def _spread(stats: Stats) -> float:
    return stats.iqr / stats.median


def _verdict(low: float, high: float, noise: float, above: str, below: str) -> str:
    if low > 1 + noise:
        return above
    return below if high < 1 / (1 + noise) else "noise"
