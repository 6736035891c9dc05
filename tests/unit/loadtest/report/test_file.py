"""Reports as JSON files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.report.file import read, rounded, to_json
from penstock.loadtest.report.model import SCHEMA, Report


def test_a_report_comes_back_as_it_was(full_report: Report, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(to_json(full_report))
    assert read(str(path)) == full_report


def test_figures_stand_at_the_top_level(make_report: Callable[..., Report]) -> None:
    tree = json.loads(to_json(make_report(open_loop=False)))
    assert tree["ttft_ms"]["p50"] == 200
    assert tree["completed"] == 3
    assert tree["errors"] == {"http_503": 1}
    assert {"itl_ms", "tpot_ms", "e2e_ms", "output_tokens_per_s", "requests_per_s", "validity"} <= tree.keys()


def test_numbers_are_rounded_and_what_is_none_is_null() -> None:
    assert rounded([1.23456789, 1234567.891234, 0.000123456789, float("nan"), float("inf"), 0.0, 3]) == [
        1.23457,
        1234567.8912,
        0.000123457,
        None,
        None,
        0.0,
        3,
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON"),
        ("[]", "has no schema"),
        ('{"duration": 3.2, "completed": 5}', "has no schema"),
        ('{"schema": "penstock-loadtest/9"}', "penstock-loadtest/9"),
        (json.dumps({"schema": SCHEMA, "label": 5}), "label"),
    ],
)
def test_what_is_no_report_is_refused_by_name(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(LoadTestError, match=problem) as raised:
        read(str(path))
    assert "other.json" in str(raised.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match=r"missing\.json: No such file"):
        read(str(tmp_path / "missing.json"))


def test_figures_that_a_run_does_not_have_are_null(make_report: Callable[..., Report]) -> None:
    tree = json.loads(to_json(replace(make_report(runs=[[]]), server=None)))
    assert tree["ttft_ms"] is None
    assert tree["requests_per_s"] == 0
