"""Files, as asked for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.messages import Sample
from penstock.loadtest.options import Options, OutputOptions, Target
from penstock.loadtest.report.file import read
from penstock.loadtest.report.model import Report
from penstock.loadtest.report.write import check_files, write

MakeReport = Callable[..., Report]


def test_each_form_goes_where_it_is_asked_to(make_report: MakeReport, samples: list[Sample], tmp_path: Path) -> None:
    names = {"json": "a", "markdown": "b", "csv": "c", "html": "d", "vllm_json": "e", "aiperf_json": "f"}
    report = make_report()
    write(report, samples, OutputOptions(**{form: str(tmp_path / name) for form, name in names.items()}))
    assert read(str(tmp_path / "a")) == report
    assert (tmp_path / "b").read_text().startswith("# Load test: alpha\n")
    assert len((tmp_path / "c").read_text().splitlines()) == 1 + len(samples)
    assert (tmp_path / "d").read_text().startswith("<!DOCTYPE html>")
    assert json.loads((tmp_path / "e").read_text())["completed"] == 3
    assert json.loads((tmp_path / "f").read_text())["request_count"]["avg"] == 3


def test_nothing_is_written_unasked(
    make_report: MakeReport, samples: list[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    write(make_report(), samples, OutputOptions())
    assert capsys.readouterr().out == ""


def test_a_dash_is_standard_output(
    make_report: MakeReport, samples: list[Sample], capsys: pytest.CaptureFixture[str]
) -> None:
    write(make_report(), samples, OutputOptions(json="-"))
    assert json.loads(capsys.readouterr().out)["label"] == "alpha"


def test_histograms_are_added_and_secrets_taken_out(make_report: MakeReport, samples: list[Sample]) -> None:
    options = Options(target=Target(url="http://server", api_key="sk-1"))
    written = write(make_report(histograms={}, options=options), samples, OutputOptions())
    assert "ttft_ms" in written.histograms
    assert written.options.target.api_key == "***"


def test_a_place_that_cannot_be_written_does_not_keep_the_others_from_it(
    make_report: MakeReport, samples: list[Sample], tmp_path: Path
) -> None:
    output = OutputOptions(json=str(tmp_path / "no" / "a.json"), csv=str(tmp_path / "a.csv"))
    with pytest.raises(LoadTestError, match=r"no/a\.json: No such file"):
        write(make_report(), samples, output)
    assert (tmp_path / "a.csv").exists()


def test_places_are_checked_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    check_files(OutputOptions(json="a", markdown="-", csv="/dev/null", html="/dev/null"))
    for output, said in (
        (OutputOptions(json="a", html="./a"), "only one form"),
        (OutputOptions(json="-", html="-"), "only one form"),
        (OutputOptions(json="file/a"), "cannot be written"),
        (OutputOptions(json="no/a"), "cannot be written"),
        (OutputOptions(json=str(tmp_path)), "is a folder"),
    ):
        with pytest.raises(LoadTestError, match=said):
            check_files(output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
