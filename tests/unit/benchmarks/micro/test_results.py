"""Files that pytest-benchmark's tools read, and that come back as they were."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks.micro.results import read, write
from penstock.loadtest.errors import LoadTestError
from unit.benchmarks.micro.samples import made

STARTED = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
STATS = {
    *("min", "max", "mean", "stddev", "rounds", "median", "iqr", "q1", "q3", "iqr_outliers", "stddev_outliers"),
    *("outliers", "ld15iqr", "hd15iqr", "ops", "total", "iterations"),
}


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    results = [made(1e-6, 2e-6, 3e-6, instructions=1234.5), made(1, 1, name="stop/none-begins")]
    write(tmp_path / "out.json", results, STARTED)
    assert read(tmp_path / "out.json") == {each.name: each for each in results}


def test_the_layout_is_pytest_benchmarks(tmp_path: Path) -> None:
    write(tmp_path / "out.json", [made(1e-6, 2e-6, others=0.25)], STARTED)
    file = json.loads((tmp_path / "out.json").read_text())
    assert {"machine_info", "commit_info", "benchmarks", "datetime", "version"} <= file.keys()
    assert file["datetime"] == "2026-11-20T12:00:00+00:00"
    assert {"python_version", "machine", "system", "cpu"} <= file["machine_info"].keys()
    (only,) = file["benchmarks"]
    assert (only["group"], only["name"], only["params"]) == ("blocks", "blocks/hash", None)
    assert set(only["stats"]) == STATS
    assert only["extra_info"] == {"operation": "block", "others": 0.25}


def test_a_file_of_pytest_benchmarks_own_is_read(tmp_path: Path) -> None:
    write(tmp_path / "out.json", [made(1e-6, 2e-6)], STARTED)
    file = json.loads((tmp_path / "out.json").read_text())
    file["benchmarks"][0] |= {"extra_info": {"theirs": 1}, "group": None, "options": {"timer": "perf_counter"}}
    file["benchmarks"][0]["stats"]["data"] = [1e-6, 2e-6]
    (tmp_path / "out.json").write_text(json.dumps(file))
    assert read(tmp_path / "out.json")["blocks/hash"].stats.max == 2e-6


@pytest.mark.parametrize("content", [b"", b"[]", b'{"benchmarks": [{}]}', b"\xff\xfe"])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "out.json").write_bytes(content)
    with pytest.raises(LoadTestError, match="holds no results of benchmarks"):
        read(tmp_path / "out.json")


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match="cannot be read: No such file"):
        read(tmp_path / "none.json")
    with pytest.raises(LoadTestError, match="cannot be written: No such file"):
        write(tmp_path / "no/folder.json", [], STARTED)
