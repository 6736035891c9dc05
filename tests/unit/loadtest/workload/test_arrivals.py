"""When sessions begin. The seeds are fixed, so the statistics are the same in each run."""

from __future__ import annotations

from itertools import islice, pairwise, takewhile
from random import Random
from statistics import fmean, pvariance
from typing import Any

import pytest

from penstock.loadtest.options import LoadOptions
from penstock.loadtest.workload.build import arrivals


def times(number: int, seed: int = 1, **load: Any) -> list[float]:
    return [at for at in islice(arrivals(LoadOptions(**load), Random(seed)), number) if at is not None]


def until(seconds: float, seed: int = 1, **load: Any) -> int:
    return len(list(takewhile(lambda at: at is not None and at < seconds, arrivals(LoadOptions(**load), Random(seed)))))


def test_a_closed_loop_has_no_times() -> None:
    assert list(islice(arrivals(LoadOptions(), Random(1)), 3)) == [None] * 3


def test_a_constant_rate_has_equal_gaps() -> None:
    assert times(4, rate=4.0, arrival="constant") == [0.0, 0.25, 0.5, 0.75]


@pytest.mark.parametrize(
    ("load", "variation"),
    [
        ({"arrival": "poisson"}, 1.0),
        ({"arrival": "gamma", "burstiness": 1.0}, 1.0),
        ({"arrival": "gamma", "burstiness": 0.25}, 4.0),
        ({"arrival": "gamma", "burstiness": 16.0}, 1 / 16),
    ],
)
def test_random_gaps_have_the_mean_and_the_variance_of_their_distribution(
    load: dict[str, Any], variation: float
) -> None:
    at = times(40_000, rate=50.0, **load)
    gaps = [later - earlier for earlier, later in pairwise([0.0, *at])]
    assert min(gaps) >= 0
    assert fmean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert pvariance(gaps) * 50**2 == pytest.approx(variation, rel=0.08)


def test_poisson_counts_spread_between_seeds_as_they_should() -> None:
    counts = [until(10.0, seed, rate=10.0) for seed in range(300)]
    assert fmean(counts) == pytest.approx(100, rel=0.03)
    assert pvariance(counts) == pytest.approx(100, rel=0.25), "arrivals were made to meet their mean"


def test_the_rate_rises_linearly() -> None:
    load = {"rate": 10.0, "arrival": "constant", "ramp": 10.0}
    assert [until(seconds, **load) for seconds in (5.0001, 10.0001, 20.0001)] == [13, 51, 151]
    assert times(200, **load)[-1] == pytest.approx(10 + (199 - 50) / 10)


def test_the_rate_of_random_arrivals_rises_linearly() -> None:
    load = {"rate": 1000.0, "ramp": 20.0}
    assert until(10, **load) == pytest.approx(2500, rel=0.05)
    assert until(20, **load) == pytest.approx(10_000, rel=0.03)
    assert until(30, **load) == pytest.approx(20_000, rel=0.03)
