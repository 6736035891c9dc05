"""Figures that can be computed by hand."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from penstock.loadtest.errors import INTERRUPTED
from penstock.loadtest.latency import parse_objectives
from penstock.loadtest.messages import Sample
from penstock.loadtest.metrics import Distribution, Figures, summarize


def sample(sent: float = 0.0, ended: float = 1.0, **fields: Any) -> Sample:
    return Sample(**({"index": 0, "intended": sent, "sent": sent, "ended": ended, "output_tokens": 10} | fields))


def seconds(*samples: Sample, lasts: float) -> float:
    return summarize(samples, open_loop=False, lasts=lasts).duration_s


def test_a_server_that_hangs_does_not_keep_the_throughput_it_had() -> None:
    answered = [sample(0.1 * n, 0.1 * n + 0.1) for n in range(10)]
    hung = sample(1.0, 5.0, error=INTERRUPTED)
    assert summarize(answered, open_loop=False, lasts=4.0).requests_per_s == 10, "nothing was cut off"
    assert summarize([*answered, hung], open_loop=False, lasts=4.0).requests_per_s == 2.5
    assert seconds(*answered, hung, lasts=inf) == 5.0, "by the user"
    assert seconds(*answered, hung, lasts=60.0) == 5.0, "by the user, before its time"
    assert seconds(*answered, hung, sample(1.0, 4.5), lasts=4.0) == 4.5, "some were answered in the grace period"
    assert seconds(lasts=4.0) == 0.0


def test_pieces_of_several_tokens() -> None:
    """Of 9 tokens the first piece brings 3, so that 6 come within 0.6 s; gaps are those of the pieces."""
    found = summarize([sample(arrivals=[0.2, 0.5, 0.8], pieces=[3, 4, 2], output_tokens=9, ended=0.9)], open_loop=False)
    assert found.tpot_ms is not None
    assert found.itl_ms is not None
    assert found.tpot_ms.p50 == pytest.approx(100)
    assert (found.itl_ms.p50, found.itl_ms.count) == (pytest.approx(300), 2)


def test_latencies_count_from_the_intended_moment_in_an_open_loop() -> None:
    late = sample(3.0, 4.0, intended=1.0, arrivals=[3.5])

    def ttft(figures: Figures) -> float | None:
        return None if figures.ttft_ms is None else figures.ttft_ms.p50

    opened, closed = (summarize([late], open_loop=open_loop) for open_loop in (True, False))
    assert (ttft(opened), ttft(closed)) == (2500, 500)
    assert (opened.e2e_ms and opened.e2e_ms.p50, opened.latency_from) == (3000, "intended")
    assert opened.from_send.ttft_ms == closed.ttft_ms


def test_goodput_is_of_all_that_were_sent_but_those_cut_off() -> None:
    samples = [sample(arrivals=[0.1]), sample(arrivals=[0.3]), sample(error="timeout"), sample(error=INTERRUPTED)]
    found = summarize(samples, open_loop=False, objectives=parse_objectives(["ttft:200"])).goodput
    assert found is not None
    assert (found.good, found.share, found.requests_per_s) == (1, 0.3333, 1.0)


def test_percentiles_lie_between_the_two_nearest_values() -> None:
    found = Distribution.of([0.001 * n for n in range(1, 11)])
    assert found is not None
    assert (found.p50, found.p90, found.p99, found.max, found.mean) == (5.5, 9.1, 9.91, 10, 5.5)
    assert Distribution.of([]) is None
