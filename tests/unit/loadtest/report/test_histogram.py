"""Latencies in bins: counts, quantiles, and shares within a bound."""

from __future__ import annotations

import math

import pytest

from penstock.loadtest.messages import Sample
from penstock.loadtest.report.histogram import Tally, attained, bins, histograms


def test_each_value_lies_in_its_bin_and_bins_are_one_percent_wide() -> None:
    values = [0.00001, 0.0123, 0.5, 0.5, 77.0]
    tally = Tally()
    tally.add(values)
    found = list(bins(tally.histogram()))
    assert [count for *_, count in found] == [1, 1, 2, 1]
    for value, (low, high, _) in zip([0.01, 12.3, 500.0, 77_000.0], found, strict=True):
        assert low <= value * (1 + 1e-9)
        assert value < high
        assert high / low == pytest.approx(1.01)


def test_pieces_that_came_together_are_counted_apart() -> None:
    tally = Tally()
    tally.add([0.0, 0.0, 0.000009, 0.02])
    assert tally.histogram().below == 3
    assert next(bins(tally.histogram())) == (0.0, 0.01, 3)
    assert tally.quantile(0.5) == 0.0


def test_quantiles_are_within_one_percent() -> None:
    values = [0.001 * 1.003**i for i in range(2000)]
    tally = Tally()
    for start in range(0, 2000, 7):
        tally.add(values[start : start + 7])
    for share in (0.0, 0.5, 0.9, 0.99, 1.0):
        exact = values[math.floor(share * 1999)] * 1e3
        assert tally.quantile(share) == pytest.approx(exact, rel=0.0101)
    assert Tally().quantile(0.5) is None


def test_failed_requests_keep_no_bound_and_those_without_the_figure_keep_all(samples: list[Sample]) -> None:
    found = histograms(samples, open_loop=False)
    # TTFT from send: 100, 300, 200 ms; one request failed
    assert attained(found["ttft_ms"], 90) == 0
    assert attained(found["ttft_ms"], 250) == pytest.approx(2 / 4)
    assert attained(found["ttft_ms"], 1e6) == pytest.approx(3 / 4)
    # one request of three has one token, and no TPOT
    assert found["tpot_ms"].absent == 1
    assert attained(found["tpot_ms"], 1) == pytest.approx(1 / 4)
    assert attained(found["longest_gap_ms"], 250) == pytest.approx(2 / 4)


def test_latencies_count_from_where_they_are_asked_to(samples: list[Sample]) -> None:
    intended = histograms(samples, open_loop=True)["ttft_ms"]
    assert attained(intended, 350) == pytest.approx(2 / 4)  # 100, 800, 200 ms
    assert sum(count for *_, count in bins(intended)) == 3


def test_gaps_are_those_of_all_requests_together(samples: list[Sample]) -> None:
    found = histograms(samples, open_loop=False)["itl_ms"]
    assert [round((low + high) / 2, -1) for low, high, _ in bins(found)] == [100, 200, 300]


def test_nothing_has_no_histogram() -> None:
    assert histograms([], open_loop=False) == {}
