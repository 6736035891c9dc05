"""Keeping up, and runs put together."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from penstock.loadtest.errors import INTERRUPTED
from penstock.loadtest.messages import Sample
from penstock.loadtest.report.model import Validity
from penstock.loadtest.search.runs import kept_up, merge, of_round
from unit.loadtest.search.computed import ComputedServer, answered, chosen, report_of


def share(rate: float, server: ComputedServer) -> float:
    return server(chosen(rate=rate, duration=30), "").kept_up


def test_a_server_below_its_capacity_keeps_up() -> None:
    server = ComputedServer()
    assert share(0.5 * server.capacity, server) == pytest.approx(1.0)
    assert share(server.capacity, server) == pytest.approx(1.0)


@pytest.mark.parametrize("overload", [1.1, 1.5, 4.0])
def test_above_it_completes_its_capacity(overload: float) -> None:
    server = ComputedServer()
    assert share(overload * server.capacity, server) == pytest.approx(1 / overload, rel=0.01)


def test_long_requests_do_not_look_like_a_server_that_is_late() -> None:
    """Each takes a third of the run, but all take the same."""
    assert share(2.0, ComputedServer(places=100, seconds=10.0)) == pytest.approx(1.0)


def test_what_is_refused_is_not_kept_up_with() -> None:
    good = [answered(index, index / 10, index / 10, index / 10 + 0.1) for index in range(100)]
    refused = [Sample(index=index, intended=0.0, sent=0.0, ended=0.0, error="http_503") for index in range(25)]
    cut_off = [Sample(index=0, intended=0.0, sent=0.0, ended=9.0, error=INTERRUPTED)] * 75
    assert kept_up(good) == pytest.approx(1.0)
    assert kept_up([*good, *refused]) == pytest.approx(0.8)
    assert kept_up([*good, *refused, *cut_off]) == pytest.approx(0.5)


def test_requests_that_take_longer_than_the_grace_period_are_cut_off_at_the_end_of_every_run() -> None:
    """One each second for 300 seconds, and 30 seconds more: nothing is said against the server by the last minute."""

    def run(seconds: float, *, until: float = 300.0) -> list[Sample]:
        answers = [answered(due, due, due, due + seconds) for due in range(300)]
        return [
            answer
            if answer.intended < until and answer.ended <= 330
            else Sample(index=answer.index, intended=answer.intended, sent=answer.sent, ended=330, error=INTERRUPTED)
            for answer in answers
        ]

    assert kept_up(run(90.0)) == pytest.approx(1.0)
    assert kept_up(run(1.0, until=150)) == pytest.approx(0.5), "it answers nothing any more"


def test_few_requests_say_nothing_about_rates() -> None:
    late = [answered(index, index / 10, float(index), index + 1.0) for index in range(9)]
    assert kept_up(late) == 1.0
    assert kept_up([]) == 0.0


def test_merged_runs_are_the_repeats_of_one() -> None:
    settings = chosen(repeat=3)
    reports = [
        report_of(of_round(settings, number), [answered(0, 0.0, 0.0, seconds)])
        for number, seconds in enumerate((1.0, 2.0, 6.0))
    ]
    doubtful = Validity(verdict="doubtful", reasons=["a"], client_cores=0.5)
    reports[1] = replace(reports[1], validity=doubtful)
    reports[2] = replace(reports[2], validity=Validity(verdict="valid"))
    merged = merge(reports, settings)
    assert merged.e2e_ms is not None
    assert merged.e2e_ms.p50 == 2000
    assert len(merged.runs) == 3
    assert merged.intervals["e2e_ms.p50"].low < 3000 < merged.intervals["e2e_ms.p50"].high
    assert merged.options.load.repeat == 3
    assert merged.options.workload.seed == settings.workload.seed
    assert merged.validity == doubtful


def test_each_round_sends_other_requests() -> None:
    rounds = [of_round(chosen(repeat=2, seed=7), number) for number in range(2)]
    assert [(each.workload.seed, each.load.repeat) for each in rounds] == [(7, 1), (8, 1)]
