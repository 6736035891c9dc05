"""Engine processes that are started before it is known what they will load."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import psutil
import pytest

from penstock.engines.process.client import ProcessEngine
from penstock.engines.process.worker_process import WorkerProcess, end_unused, new_worker, start_early
from penstock.engines.registry import EngineSpec

SIMULATED = EngineSpec(runner="simulated", options={"num_blocks": 64})


@pytest.fixture(autouse=True)
def _none_is_left() -> Iterator[None]:
    yield
    end_unused()


def started(engine: str) -> psutil.Process:
    before = psutil.Process().children()
    start_early(engine)
    [process] = [child for child in psutil.Process().children() if child not in before]
    return process


async def test_an_engine_uses_the_process_that_expects_it() -> None:
    expecting_torch, early = started("torch"), started("simulated")
    engine = ProcessEngine(SIMULATED)
    await engine.start()
    assert engine.pid == early.pid
    end_unused()
    assert not expecting_torch.is_running()
    assert engine.ready
    other = ProcessEngine(SIMULATED)
    await other.start()
    assert other.pid != early.pid
    await asyncio.gather(engine.stop(), other.stop())


async def test_a_process_that_has_died_meanwhile_is_not_used() -> None:
    early = started("simulated")
    early.kill()
    while early.status() != psutil.STATUS_ZOMBIE:
        await asyncio.sleep(0.01)
    engine = ProcessEngine(SIMULATED)
    await engine.start()
    assert engine.pid != early.pid
    await engine.stop()


async def test_a_process_without_an_order_ends_quietly(capfd: pytest.CaptureFixture[str]) -> None:
    start_early("openvino")
    process = new_worker("openvino")
    os.kill(process.pid, signal.SIGTERM)  # the terminal's: its parent's business
    process.tell_to_end()
    assert await asyncio.wait_for(process.wait(), 60) in (0, -signal.SIGTERM)
    assert capfd.readouterr() == ("", "")


async def test_an_order_for_a_process_that_has_ended_is_told_by_its_end() -> None:
    process = WorkerProcess()
    process.kill()
    process.reap()
    await process.order(b"{}\n")
    assert await process.wait() == -signal.SIGKILL
    process.kill()
