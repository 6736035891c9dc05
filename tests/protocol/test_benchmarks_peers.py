"""`python loadtest/benchmarks peers` on servers that need no environment of their own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.loadtest.environment import family
from support.processes import is_running
from support.server import wait_until

SHORT = ("--tables", "streaming", "--streams", "4", "--output-tokens", "16", "--repeat", "1")

BENCHMARKS = Path(__file__).parents[2] / "loadtest" / "benchmarks"


def command(folder: Path, *flags: str) -> list[str]:
    files = ("--json", str(folder / "out.json"), "--markdown", str(folder / "out.md"))
    return [sys.executable, str(BENCHMARKS), "peers", "--dir", str(folder), *files, *flags]


def test_the_streaming_tables(tmp_path: Path) -> None:
    flags = (*SHORT, "--tables", "paced,streaming", "--seconds", "0.5")
    done = subprocess.run(command(tmp_path, *flags), capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    paced, group = json.loads((tmp_path / "out.json").read_text())["groups"]
    assert (paced["failures"], group["failures"]) == ({}, {})
    for cell in paced["cases"][0]["cells"].values():
        figures = cell["runs"][0]["figures"]
        events = figures["itl_ms"]["count"] + figures["completed"]
        assert events > 0.5 * figures["output_tokens"], "each in an event, but for a client that was busy"
    [case] = group["cases"]
    assert set(case["cells"]) == {"starlette", "sse-starlette", "penstock-stream"}
    for name, cell in case["cells"].items():
        [run] = cell["runs"]
        figures = run["figures"]
        assert figures["output_tokens"] == 16 * figures["completed"] > 0, name
        assert run["server_cpu_us"] >= run["front_cpu_us"] >= 0
        assert cell["memory_mb"] > 5
    # the kernel counts in ticks: on a busy machine a run may be over before one server has had its first
    assert any(cell["runs"][0]["front_cpu_us"] > 0 for cell in case["cells"].values())
    assert "## Streaming without a model, as fast as it goes" in (tmp_path / "out.md").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ended_early_all_servers_end_and_there_is_a_report(tmp_path: Path, number: signal.Signals) -> None:
    process = subprocess.Popen(command(tmp_path, *SHORT, "--seconds", "60"), stderr=subprocess.PIPE, text=True)
    try:
        last = tmp_path / "logs" / "streaming-penstock-stream.log"
        wait_until(lambda: last.is_file() and last.stat().st_size > 0, 60)  # all are started, and the last one speaks
        started = family([process.pid])
        assert len(started) > 2
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "ended early" in said
    wait_until(lambda: not any(map(is_running, started)))
    assert json.loads((tmp_path / "out.json").read_text())["interrupted"] is True
    assert "**Ended early by the user**" in (tmp_path / "out.md").read_text()


def test_nothing_to_measure(tmp_path: Path) -> None:
    flags = ("--tables", "tensors", "--only", "triton,mlserver")
    done = subprocess.run(command(tmp_path, *flags), capture_output=True, text=True, timeout=110)
    assert done.returncode == 1
    assert "nothing to measure: triton: it is not set up (--setup); mlserver: it is not set up (--setup)" in done.stderr
    assert not (tmp_path / "out.json").exists()
