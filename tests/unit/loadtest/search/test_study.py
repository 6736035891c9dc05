"""Reports of rows of runs in their forms."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.messages import Sample
from penstock.loadtest.options import Options, OutputOptions
from penstock.loadtest.search.find import run_find
from penstock.loadtest.search.findings import comparison_findings, search_findings, sweep_findings
from penstock.loadtest.search.runs import Run
from penstock.loadtest.search.study import Study, check_output, write_study
from penstock.loadtest.search.sweep import run_sweep
from penstock.loadtest.search.versus import run_versus
from unit.loadtest.search.computed import ComputedServer, answered, chosen, report_of

SECRETS = {"api_key": "alpha-key", "vs_api_key": "beta-key"}


def write(study: Any, describe: Any, folder: Path) -> Study:
    output = OutputOptions(**{form: str(folder / form) for form in ("json", "markdown", "csv", "html")})
    return write_study(study, describe, output)  # type: ignore[no-any-return]


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "csv").open() as file:
        return list(csv.DictReader(file))


def test_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    study = run_sweep(chosen(sweep="concurrency=2,4,8", goodput=["e2e:300"], label="<b>x"), ComputedServer())
    write(study, sweep_findings, tmp_path)
    tree = json.loads((tmp_path / "json").read_text())
    assert tree["schema"] == "penstock-loadtest-sweep/1"
    assert [point["value"] for point in tree["points"]] == [2, 4, 8]
    assert tree["points"][1]["report"]["requests_per_s"] == pytest.approx(20, rel=0.02)
    assert [row["concurrency"] for row in rows(tmp_path)] == ["2", "4", "8"]
    assert float(rows(tmp_path)[0]["e2e_ms.p50"]) == 200
    page, text = (tmp_path / "html").read_text(), (tmp_path / "markdown").read_text()
    assert "<b>x" not in page
    assert "<title>Sweep: " in page
    assert page.count('<td class="number">') > 20, "figures stand below one another"
    assert "The knee is at concurrency 4" in page
    assert "The knee is at concurrency 4" in text
    assert "knee" in capsys.readouterr().out


def test_failures_are_told_with_what_they_said(tmp_path: Path) -> None:
    def refuse(settings: Options, text: str) -> Run:
        busy = Sample(index=0, intended=0.0, sent=0.0, ended=1.0, error="http_503", detail="queue is\x1bfull")
        return Run(report_of(settings, [answered(1, 0.0, 0.0, 1.0), busy]), 1.0)

    write(run_sweep(chosen(sweep="rate=1,2"), refuse), sweep_findings, tmp_path)
    assert "Failed: 2 × http_503: queue is full" in (tmp_path / "markdown").read_text()
    assert "Failed: 2 × http_503: queue is full" in (tmp_path / "html").read_text()


def test_a_search(tmp_path: Path) -> None:
    study = run_find(chosen(find="rate", slo=["e2e_p99:250"]), ComputedServer())
    write(study, search_findings, tmp_path)
    tree = json.loads((tmp_path / "json").read_text())
    assert tree["held"] < tree["failed"]
    assert len(rows(tmp_path)) == len(tree["probes"]) == len(study.probes)
    assert {row["outcome"] for row in rows(tmp_path)} == {"held", "failed"}
    text = (tmp_path / "markdown").read_text()
    assert "E2E p99 ≤ 250 ms" in text
    assert f"between {study.held:g} and {study.failed:g}" in text


def test_two_servers_without_their_keys(tmp_path: Path) -> None:
    settings = chosen(vs="http://other", vs_label="B1", repeat=2, duration=5, **SECRETS)
    study = run_versus(settings, ComputedServer())
    leaky = write(study, comparison_findings, tmp_path)
    assert leaky.reports[1].options.target.api_key == "***"
    for form in ("json", "markdown", "csv", "html"):
        text = (tmp_path / form).read_text()
        assert "alpha-key" not in text
        assert "beta-key" not in text
    assert json.loads((tmp_path / "json").read_text())["order"] == "ABBA"
    assert {row["verdict"] for row in rows(tmp_path)} == {"no difference seen"}


def test_standard_output_is_for_one_form_only(capsys: pytest.CaptureFixture[str]) -> None:
    study = run_sweep(chosen(sweep="rate=2"), ComputedServer())
    write_study(study, sweep_findings, OutputOptions(json="-"))
    assert json.loads(capsys.readouterr().out)["swept"] == "rate"


def test_a_file_that_cannot_be_written_does_not_take_the_others_along(tmp_path: Path) -> None:
    study = run_sweep(chosen(sweep="rate=2"), ComputedServer())
    with pytest.raises(LoadTestError, match="No such file"):
        write_study(study, sweep_findings, OutputOptions(json=str(tmp_path / "none" / "x"), csv=str(tmp_path / "csv")))
    assert len(rows(tmp_path)) == 1


@pytest.mark.parametrize("form", ["vllm_json", "aiperf_json"])
def test_forms_of_single_runs_are_refused(form: str) -> None:
    check_output(OutputOptions(json="x"))
    with pytest.raises(LoadTestError, match="single run"):
        check_output(OutputOptions(**{form: "x"}))
