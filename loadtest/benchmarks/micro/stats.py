"""What pytest-benchmark says of a benchmark's rounds, under its names."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from benchmarks.micro.measure import Rounds


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds for one iteration, which is one operation of the benchmark."""

    min: float
    max: float
    mean: float
    stddev: float
    """Of the rounds, with n - 1."""
    rounds: int
    median: float
    iqr: float
    q1: float
    q3: float
    iqr_outliers: int
    """Rounds more than 1.5 IQR away from the quartiles."""
    stddev_outliers: int
    """Rounds more than a standard deviation away from the mean."""
    outliers: str
    """`stddev_outliers;iqr_outliers`"""
    ld15iqr: float
    """The shortest round that is no outlier by IQR; `hd15iqr` is the longest."""
    hd15iqr: float
    ops: float
    """Operations per second, at the mean."""
    total: float
    """Seconds that all rounds took."""
    iterations: int
    """In one round."""


def summary(rounds: Rounds) -> Stats:
    """Of at least two rounds."""
    times = sorted(rounds.seconds)
    mean, stddev = statistics.fmean(times), statistics.stdev(times)
    q1, median, q3 = statistics.quantiles(times, n=4, method="inclusive")
    reach = 1.5 * (q3 - q1)
    inside = [time for time in times if q1 - reach <= time <= q3 + reach]
    iqr_outliers = len(times) - len(inside)
    stddev_outliers = _beyond(times, mean, stddev)
    return Stats(
        min=times[0],
        max=times[-1],
        mean=mean,
        stddev=stddev,
        rounds=len(times),
        median=median,
        iqr=q3 - q1,
        q1=q1,
        q3=q3,
        iqr_outliers=iqr_outliers,
        stddev_outliers=stddev_outliers,
        outliers=f"{stddev_outliers};{iqr_outliers}",
        ld15iqr=inside[0],
        hd15iqr=inside[-1],
        ops=1 / mean,
        total=sum(times) * rounds.operations,
        iterations=rounds.operations,
    )


def _beyond(times: Sequence[float], center: float, distance: float) -> int:
    return sum(abs(time - center) > distance for time in times)
