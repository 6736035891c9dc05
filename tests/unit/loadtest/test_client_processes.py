"""What client processes are allowed, and how they end."""

from __future__ import annotations

import asyncio
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.loadtest import main, worker
from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.fleet import Fleet, kill
from penstock.loadtest.options import Options, Target


async def test_killing_leaves_the_status_to_the_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Popen.poll would take it, if the process had ended a moment before."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=subprocess.PIPE)
    asked: list[int] = []
    monkeypatch.setattr(subprocess.Popen, "poll", lambda popen: asked.append(popen.pid))
    kill(process)
    assert await process.wait() == -signal.SIGKILL
    kill(process)
    assert asked == []


def limited(monkeypatch: pytest.MonkeyPatch, now: int, most: int) -> list[tuple[int, int]]:
    """Limits as they were set."""
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (now, most))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: asked.append(limits))
    return asked


def test_as_many_connections_as_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = limited(monkeypatch, 256, 4096)
    worker._allow_connections(2000)
    assert asked == [(4096, 4096)]
    with pytest.raises(LoadTestError, match=r"concurrency: 5000 connections need more than the 4096 files"):
        worker._allow_connections(5000)
    limited(monkeypatch, resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    worker._allow_connections(1_000_000)


def test_ctrl_c_does_not_cost_a_report_that_is_being_written() -> None:
    before = signal.getsignal(signal.SIGINT)
    with main._ignoring_ctrl_c():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is before


TALKATIVE = """#!{python}
import sys, time
from penstock.loadtest.job import Done, Progress, Ready, send
from penstock.loadtest.messages import Sample
out = sys.stdout.buffer
send(out, Ready())
send(out, Done(cpu_seconds=1.0, wall_seconds=1.0, lag_ms=[]))
send(out, Done(cpu_seconds=1.0, wall_seconds=1.0, lag_ms=[0.0] * 100_000))
out.flush()
time.sleep(600)
"""


async def test_a_process_that_says_more_than_is_read_ends_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """asyncio pauses reading then, and would wait for the end of the pipe for ever."""
    script = tmp_path / "python"
    script.write_text(TALKATIVE.format(python=sys.executable))
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    options = Options(target=Target(url="http://127.0.0.1:9", model="m", protocol="openai-completions"))
    async with asyncio.timeout(30):
        async with Fleet(options, 1, 0) as fleet:
            result = await fleet.run()
            unread = fleet._processes[0].stdout
            while not unread._paused:  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
    assert len(result.clients) == 1
