"""Sweeps over a computed server with four places: its knee is at four requests at a time."""

from __future__ import annotations

import pytest

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.search.findings import sweep_findings
from penstock.loadtest.search.model import SweepReport
from penstock.loadtest.search.sweep import run_sweep
from unit.loadtest.search.computed import ComputedServer, chosen


def sweep(text: str, server: ComputedServer | None = None, **settings: object) -> SweepReport:
    return run_sweep(chosen(sweep=text, **settings), server or ComputedServer())


def test_throughput_rises_up_to_the_knee() -> None:
    study = sweep("concurrency=1:16:x2")
    assert [point.value for point in study.points] == [1, 2, 4, 8, 16]
    rates = [point.report.requests_per_s for point in study.points]
    assert rates[:3] == pytest.approx([5, 10, 20], rel=0.02)
    assert rates[3:] == pytest.approx([20, 20], rel=0.05)
    assert study.knee == 4
    assert "knee is at concurrency 4" in " ".join(sweep_findings(study).answer)


def test_a_knee_beyond_the_sweep_is_none() -> None:
    study = sweep("concurrency=1,2,4")
    assert study.knee is None
    assert study.peak == 4
    assert any("beyond" in note for note in study.notes)


def test_invalid_runs_are_neither_peak_nor_knee() -> None:
    study = sweep("rate=5,10,20,40,80", ComputedServer(places=16, client_rate=39))
    assert study.peak == 20
    assert any(note.startswith("rate 40, 80: invalid: the client was late") for note in study.notes)


def test_repeats_are_interleaved() -> None:
    server = ComputedServer()
    study = sweep("rate=1,2", server, repeat=3)
    assert [settings.load.rate for settings in server.ran] == [1, 2, 1, 2, 1, 2]
    assert [settings.workload.seed for settings in server.ran] == [0, 1, 2, 3, 4, 5], (
        "with prompts of the run before, a server would answer from its prefix cache"
    )
    assert [len(point.report.runs) for point in study.points] == [3, 3]
    assert server.told[3] == "run 4 of 6: rate 2"


def test_a_sweep_of_something_else_has_titles_and_no_knee() -> None:
    study = sweep("output_tokens=8,16,32", label="x")
    assert study.knee is None
    assert [report.label for report in study.reports] == [
        "x, output_tokens 8",
        "x, output_tokens 16",
        "x, output_tokens 32",
    ]
    assert study.notes == []


@pytest.mark.parametrize(
    ("error", "said"), [(KeyboardInterrupt(), "by the user"), (LoadTestError("no answer"), "no answer")]
)
def test_what_has_been_run_is_reported(error: BaseException, said: str) -> None:
    study = sweep("rate=1,2,3", ComputedServer(spoil=lambda number: error if number == 2 else None))
    assert [point.value for point in study.points] == [1, 2]
    assert study.ended_early == said


@pytest.mark.parametrize("error", [KeyboardInterrupt(), LoadTestError("no answer")])
def test_without_any_run_there_is_no_report(error: BaseException) -> None:
    with pytest.raises(type(error)):
        sweep("rate=1,2,3", ComputedServer(spoil=lambda number: error))
