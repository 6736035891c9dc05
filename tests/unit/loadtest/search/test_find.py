"""Searches with computed servers, whose capacity is known."""

from __future__ import annotations

import pytest

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.search.find import KEEPS_UP, run_find
from penstock.loadtest.search.findings import search_findings
from penstock.loadtest.search.model import FindReport
from unit.loadtest.search.computed import ComputedServer, chosen


def find(what: str, server: ComputedServer | None = None, **settings: object) -> FindReport:
    return run_find(chosen(find=what, **settings), server or ComputedServer())


def test_the_rate_that_a_server_keeps_up_with() -> None:
    server = ComputedServer()
    study = find("rate", server)
    edge = server.capacity / KEEPS_UP
    assert study.outcome == "found"
    assert study.held is not None
    assert study.failed is not None
    assert study.held <= edge * 1.01
    assert study.failed >= edge * 0.99
    assert study.failed <= study.held * 1.06
    assert study.probes[-1].misses == [] or "of the rate of arrivals" in study.probes[-1].misses[0]
    assert all(settings.load.duration == 30 for settings in server.ran)
    assert "lies between" in search_findings(study).answer[0]


def test_the_rate_within_a_bound() -> None:
    """Above the capacity waiting grows through the run: the bound on it breaks before the rate is not kept up with."""
    study = find("rate", slo=["e2e_p99:250"])
    assert study.held is not None
    assert study.failed is not None
    assert study.held <= 20.05
    assert 20 < study.failed <= study.held * 1.06
    assert any(miss.startswith("E2E p99 ≤ 250 ms") for probe in study.probes for miss in probe.misses)


def test_the_concurrency_within_a_bound() -> None:
    server = ComputedServer()
    study = find("concurrency", server, slo=["e2e_p99:450"], concurrency=2)
    assert server.ran[0].load.concurrency == 2
    assert (study.held, study.failed) == (8, 9)  # twice the places wait for one request at most, 200 ms each
    assert study.bounds == ["E2E p99 ≤ 450 ms", "failed requests ≤ 1 %"]
    assert "requests at a time" in search_findings(study).answer[0]


def test_reports_are_merged_by_value_upwards() -> None:
    study = find("concurrency", slo=["e2e_p50:399"])
    loads = [report.options.load.concurrency for report in study.reports]
    assert loads == sorted(set(loads))
    assert sum(len(report.runs) for report in study.reports) == len(study.probes)


def test_each_run_sends_other_requests() -> None:
    server = ComputedServer()
    find("rate", server)
    seeds = [settings.workload.seed for settings in server.ran]
    assert len(set(seeds)) == len(seeds)


def test_a_client_at_its_end_is_the_verdict() -> None:
    study = find("rate", ComputedServer(client_rate=10))
    assert study.outcome == "client-bound"
    assert (study.held, study.failed) == (8, None)
    assert study.probes[-1].invalid == "the client was late"
    assert "client, not the server" in " ".join(search_findings(study).answer)


def test_long_requests_get_long_runs() -> None:
    server = ComputedServer(places=40, seconds=10.0)
    study = find("rate", server)
    assert [settings.load.duration for settings in server.ran[:2]] == [30, 100]
    assert {settings.load.duration for settings in server.ran[2:]} == {100}
    assert any("each run lasts 100 s" in note for note in study.notes)
    assert study.held is not None
    assert study.failed is not None
    assert study.held <= 4 / KEEPS_UP * 1.05
    assert study.failed >= 4 * 0.95


def test_a_given_length_stays_but_is_doubted() -> None:
    server = ComputedServer(places=40, seconds=10.0)
    study = find("rate", server, duration=20)
    assert {settings.load.duration for settings in server.ran} == {20}
    assert any("raise --duration" in note for note in study.notes)


@pytest.mark.parametrize(
    ("what", "settings", "said"),
    [
        ("rate", {"requests": 10}, "--duration instead"),
        ("concurrency", {}, "--slo"),
        ("concurrency", {"rate": 2, "slo": ["ttft_p50:9"]}, "would change nothing"),
        ("rate", {"trace": "t"}, "its own times"),
        ("rate", {"turns": 2}, "bounds with --slo"),
        ("rate", {"slo": ["goodput:0.9"]}, "good request"),
    ],
)
def test_what_cannot_be_searched(what: str, settings: dict[str, object], said: str) -> None:
    with pytest.raises(LoadTestError, match=said):
        find(what, **settings)


def test_ended_early_there_is_what_was_found_until_then() -> None:
    study = find("rate", ComputedServer(spoil=lambda number: KeyboardInterrupt() if number == 3 else None))
    assert (study.held, study.failed, study.outcome) == (4, None, "unfinished")
    assert study.ended_early == "by the user"
    assert len(study.probes) == 3


@pytest.mark.parametrize("error", [KeyboardInterrupt(), LoadTestError("no answer")])
def test_without_any_run_there_is_no_answer(error: BaseException) -> None:
    with pytest.raises(type(error)):
        find("rate", ComputedServer(spoil=lambda number: error))


def test_runs_are_bounded() -> None:
    server = ComputedServer()
    study = find("rate", server, max_runs=3)
    assert len(server.ran) == 3
    assert study.outcome == "unfinished"
    assert (study.held, study.failed) == (4, None)
