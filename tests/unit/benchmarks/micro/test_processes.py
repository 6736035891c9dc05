"""A benchmark in a process of its own, with and without callgrind."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.micro import callgrind, isolate
from benchmarks.micro.benchmark import Benchmark, Work
from benchmarks.micro.child import answer
from benchmarks.micro.measure import LEAST_ROUNDS
from penstock.loadtest.errors import LoadTestError

needs_valgrind = pytest.mark.skipif(shutil.which("valgrind") is None, reason="valgrind is not installed")


def test_its_figures_come_back() -> None:
    stats = isolate.timed("blocks/hash", 0.0).stats
    assert stats is not None
    assert stats.rounds >= LEAST_ROUNDS
    assert 0 < stats.min <= stats.median <= stats.max
    assert stats.iterations % 200 == 0


def test_one_that_fails_says_why() -> None:
    with pytest.raises(LoadTestError, match="no/such failed: KeyError: 'no/such'"):
        isolate.timed("no/such", 0.0)


def test_one_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolate, "_LONGEST", 0.01)
    with pytest.raises(LoadTestError, match="blocks/hash has not ended within"):
        isolate.timed("blocks/hash", 0.0)


def test_a_missing_package_skips_it() -> None:
    def setup() -> Work:
        import no_such_package  # type: ignore[import-not-found]

        return Work(no_such_package.run)

    found = answer(Benchmark("made/up", "call", setup), "0")
    assert (found.skipped, found.stats) == ("needs the package no_such_package", None)


def test_a_part_of_ours_that_is_missing_does_not() -> None:
    def setup() -> Work:
        raise ModuleNotFoundError(name="penstock.engines.gone")

    with pytest.raises(ModuleNotFoundError):
        answer(Benchmark("made/up", "call", setup), "0")


def test_counting_on_a_bare_processor_changes_nothing() -> None:
    calls: list[str] = []
    assert callgrind.count(Work(lambda: calls.append("run"), operations=3)) == 3 * callgrind.CALLS
    assert len(calls) == 2 * callgrind.CALLS, "as many to warm up"
    assert gc.isenabled()
    calls.clear()
    renewed = Work(lambda: calls.append("run"), operations=3, renew=lambda: calls.append("renew"))
    assert callgrind.count(renewed) == 3
    assert calls == ["renew", "run"] * 2


@needs_valgrind
def test_counts_hardly_differ() -> None:
    (first, one), (_, other) = (isolate.counted("blocks/hash") for _ in range(2))
    assert first.counted == 200 * callgrind.CALLS
    assert one > 1000
    assert one == pytest.approx(other, rel=0.02)


@needs_valgrind
def test_only_what_is_measured_is_counted(tmp_path: Path) -> None:
    code = (
        "import sys; from benchmarks.micro.benchmark import Work; from benchmarks.micro import callgrind;"
        "number = int(sys.argv[1]); callgrind.count(Work(lambda: sum(range(number))))"
    )

    def instructions(number: int) -> float:
        out = tmp_path / "out"
        program = [sys.executable, "-c", code, str(number)]
        subprocess.run(callgrind.command(program, out), check=True, timeout=60, capture_output=True)
        return callgrind.total(out) / callgrind.CALLS

    short, long = instructions(10_000), instructions(20_000)
    assert long == pytest.approx(2 * short, rel=0.05)


def test_without_valgrind_there_are_no_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(callgrind, "platform", SimpleNamespace(system=lambda: "Linux", machine=lambda: "x86_64"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LoadTestError, match="needs valgrind, which is not installed"):
        callgrind.valgrind()
    monkeypatch.setattr(callgrind, "platform", SimpleNamespace(system=lambda: "Linux", machine=lambda: "aarch64"))
    with pytest.raises(LoadTestError, match="on x86-64 only"):
        callgrind.valgrind()


@pytest.mark.parametrize("content", [None, "events: Ir\n", "totals: 0\n"])
def test_nothing_counted_is_an_error(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "out").write_text(content)
    with pytest.raises(LoadTestError, match="has counted nothing"):
        callgrind.total(tmp_path / "out")
