"""The figures of a table, against ones worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.micro.measure import Rounds
from benchmarks.micro.stats import summary


def test_of_five_rounds_with_an_outlier() -> None:
    stats = summary(Rounds([3.0, 1.0, 2.0, 4.0, 20.0], 10))
    assert (stats.min, stats.q1, stats.median, stats.q3, stats.max) == (1, 2, 3, 4, 20)
    assert (stats.mean, stats.iqr, stats.rounds, stats.iterations) == (6, 2, 5, 10)
    assert stats.stddev == pytest.approx((250 / 4) ** 0.5)
    assert stats.outliers == "1;1"
    assert (stats.ld15iqr, stats.hd15iqr) == (1, 4)
    assert stats.ops == pytest.approx(1 / 6)
    assert stats.total == 300


def test_of_equal_rounds() -> None:
    stats = summary(Rounds([2.0] * 7, 1))
    assert (stats.stddev, stats.iqr, stats.outliers, stats.ld15iqr, stats.hd15iqr) == (0, 0, "0;0", 2, 2)
