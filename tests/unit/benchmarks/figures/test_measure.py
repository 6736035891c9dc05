"""A row of the README, measured by one command and kept as data."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.figures import measure as measuring
from benchmarks.figures.main import main, read
from benchmarks.figures.measure import Measured, ReadmeRow, keep, measure_row, measured
from benchmarks.peers.plan import plan
from benchmarks.peers.results import Cell, PeersReport
from benchmarks.peers.settings import settings
from penstock.loadtest.errors import LoadTestError
from support.peer_reports import report_of, run_of

ROW = ReadmeRow(
    name="some",
    title="Some",
    text="Some",
    code=(),
    method="",
    peers={"only": ["vllm"], "models": ["tiny"]},
    table="generation",
    contender="penstock",
    cases=("4 at a time",),
)


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "memory_speed", lambda: 12.34e9)


def measured_row(monkeypatch: pytest.MonkeyPatch, report: PeersReport) -> Measured:
    monkeypatch.setattr(measuring, "measure", lambda chosen: report)
    return measure_row(ROW, "peers")


def test_a_row_has_its_ratio_its_machine_and_its_table(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {"vllm": Cell(runs=[run_of(3.0)] * 3), "penstock": Cell(runs=[run_of(2.0)] * 3)}
    row = measured_row(monkeypatch, report_of("generation", "vllm", **cells))
    assert row.figure == "1.50"
    assert row.machine.startswith("Some CPU, 2 cores, ")
    assert row.machine.endswith(", memory read at 12.3 GB/s")
    assert row.versions == "some 2"
    assert [line for line in row.body if line.startswith("| 4 ")]
    assert not any(line.startswith("#") for line in row.body), "the page has a heading of its own"


def test_figures_of_invalid_runs_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {"vllm": Cell(runs=[run_of(3.0, verdict="invalid")]), "penstock": Cell(runs=[run_of(2.0)])}
    assert measured_row(monkeypatch, report_of("generation", "vllm", **cells)).figure == "1.50 †"


def test_without_a_ratio_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {"vllm": Cell(runs=[run_of(3.0)]), "penstock": Cell(failure="it has ended")}
    with pytest.raises(LoadTestError, match="some: 4 at a time: no ratio of penstock"):
        measured_row(monkeypatch, report_of("generation", "vllm", **cells))


def test_what_was_cut_short_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = {"vllm": Cell(runs=[run_of(3.0)]), "penstock": Cell(runs=[run_of(2.0)])}
    report = report_of("generation", "vllm", **cells)
    report.interrupted = True
    with pytest.raises(LoadTestError, match="ended early"):
        measured_row(monkeypatch, report)


def test_other_rows_and_figures_of_other_cpus_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "measured.json"
    path.write_text("{}")
    for cpu, name, figure in ("c", "a", "1"), ("c", "b", "1"), ("d", "b", "2"), ("c", "b", "3"):
        monkeypatch.setattr(measuring, "cpu_class", lambda cpu=cpu: cpu)
        row = Measured(date="2026-01-01", machine="m", versions="", method="", figure=figure, body=())
        keep(name, row, path)
    figures = {name: {cpu: row.figure for cpu, row in rows.items()} for name, rows in measured(path).items()}
    assert figures == {"a": {"c": "1"}, "b": {"c": "3", "d": "2"}}


def test_every_row_has_cases_that_its_settings_measure() -> None:
    """Those of the README have figures of its CPU, too; others may be measured later."""
    figures, known = read(), measured()
    rows = figures.readme
    assert known.keys() <= {row.name for row in rows}
    assert all(figures.readme_cpu in known[row.name] for row in rows if row.text)
    for row in rows:
        groups = [group for group in plan(settings({"dir": "d", **row.peers})) if group.table == row.table]
        assert {measuring.case_name(case) for group in groups for case in group.cases} >= set(row.cases)
        assert all(row.contender in group.contenders for group in groups)


@pytest.mark.parametrize(
    ("names", "folder", "message"), [(["x"], "d", "x is none of genai"), (["genai"], None, "--dir FOLDER")]
)
def test_what_cannot_be_measured(names: list[str], folder: str | None, message: str) -> None:
    with pytest.raises(LoadTestError, match=message):
        main({"check": True, "measure": names, "dir": folder})
