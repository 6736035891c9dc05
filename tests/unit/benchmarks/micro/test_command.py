"""`python loadtest/benchmarks micro`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.commands import main
from benchmarks.micro import isolate
from benchmarks.micro.child import Answer
from penstock.loadtest.errors import LoadTestError
from unit.benchmarks.micro.samples import made


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> dict[str, Answer | BaseException]:
    """What the processes of some benchmarks would answer; others cannot be started."""
    answers: dict[str, Answer | BaseException] = {}

    def timed(name: str, seconds: float) -> Answer:
        found = answers[name]
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr(isolate, "timed", timed)
    return answers


def bench(*arguments: str) -> int:
    return main(["micro", *arguments])


def test_a_run_of_a_real_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert bench("blocks/hash", "--min-time", "0", "--json", str(out)) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0].split()[:4] == ["name", "operation", "min", "mean"]
    assert printed.out.splitlines()[1].startswith("blocks/hash  block of 16 tokens")
    assert "[1/1] blocks/hash" in printed.err
    (only,) = json.loads(out.read_text())["benchmarks"]
    assert only["name"] == "blocks/hash"
    assert bench("blocks/hash", "--min-time", "0", "--compare", str(out)) == 0
    assert "median before" in capsys.readouterr().out


def test_listing_runs_nothing(child: dict[str, Answer], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench("stop", "--list") == 0
    assert capsys.readouterr().out.splitlines()[0] == "stop/none-begins (one piece of 5 characters)"


def test_one_that_is_skipped_and_one_that_fails_leave_the_others(
    child: dict[str, Answer | BaseException], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child["stop/none-begins"] = Answer(skipped="needs the package gone")
    child["stop/often-begins"] = Answer(stats=made(1e-6, 2e-6).stats)
    child["stop/nearly-matches"] = Answer(stats=made(1e-6, 2e-6).stats)
    out = tmp_path / "out.json"
    assert bench("stop", "--json", str(out)) == 0
    assert "stop/none-begins is skipped: it needs the package gone" in capsys.readouterr().err
    assert len(json.loads(out.read_text())["benchmarks"]) == 2

    child["stop/often-begins"] = LoadTestError("stop/often-begins failed: because")
    assert bench("stop", "--json", str(out)) == 1
    printed = capsys.readouterr()
    assert "failed: because" in printed.err
    assert "stop/nearly-matches" in printed.out
    assert [each["name"] for each in json.loads(out.read_text())["benchmarks"]] == ["stop/nearly-matches"]


def test_an_interrupted_run_shows_what_it_has(
    child: dict[str, Answer | BaseException], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    child["stop/none-begins"] = Answer(stats=made(1e-6, 2e-6).stats)
    child["stop/often-begins"] = KeyboardInterrupt()
    assert bench("stop", "--json", str(tmp_path / "out.json")) == 1
    printed = capsys.readouterr()
    assert "interrupted" in printed.err
    assert "stop/none-begins" in printed.out
    assert len(json.loads((tmp_path / "out.json").read_text())["benchmarks"]) == 1


def test_busy_neighbours_are_mentioned(
    child: dict[str, Answer | BaseException], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    child["blocks/hash"] = Answer(stats=made(1e-6, 2e-6).stats)
    monkeypatch.setattr("benchmarks.micro.main.busy_cpu_seconds", iter((10.0, 1e6)).__next__)
    assert bench("blocks/hash") == 0
    assert "while 1 benchmark ran: these times are noisy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "no benchmark is called 'nothing'"),
        (("--min-time", "-1"), "--min-time must be between 0 and 300 seconds"),
        (("--min-time", "inf"), "--min-time must be between 0 and 300 seconds"),
        (("--min-time", "nan"), "--min-time must be between 0 and 300 seconds"),
        (("--compare", "/no/such/file"), "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_runs(
    arguments: tuple[str, ...], message: str, child: dict[str, Answer], capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*arguments) == 1
    assert message in capsys.readouterr().err


def test_the_file_is_checked_before_anything_is_timed(
    child: dict[str, Answer | BaseException], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("stop", "--json", str(tmp_path / "none" / "out.json")) == 1
    said = capsys.readouterr().err
    assert "out.json: cannot be written" in said
    assert "[1/" not in said
