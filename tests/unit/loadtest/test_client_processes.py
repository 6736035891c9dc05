"""What client processes are allowed, and how they end."""

from __future__ import annotations

import asyncio
import resource
import signal
import subprocess
import sys

import pytest

from penstock.loadtest import main, worker
from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.fleet import kill


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
