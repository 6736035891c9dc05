"""Steps and loads that take long: some are waited for, some are ended, and what is ended is said once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.messages import AddRequest, RequestOutput, SamplingParams
from penstock.engines.errors import EngineError, NotReadyError
from penstock.engines.process.client import ProcessEngine
from penstock.engines.process.liveness import WatchdogConfig
from penstock.engines.registry import EngineSpec
from penstock.engines.scheduler.config import SchedulerConfig
from support.processes import children, is_running

MARKER = 7
Start = Callable[..., Awaitable[ProcessEngine]]


def engine_of(watchdog: WatchdogConfig, **options: Any) -> ProcessEngine:
    scheduling = "engine" if "own_thread" in options else "auto"
    # without a target for the ITL a prompt is one step, however long
    limits = SchedulerConfig(itl_target_ms=0)
    options = {"first_token_id": 100, **options}
    return ProcessEngine(
        EngineSpec(runner="simulated", scheduling=scheduling, options=options, scheduler=limits), watchdog
    )


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    engines: list[ProcessEngine] = []

    async def _start(watchdog: WatchdogConfig, **options: Any) -> ProcessEngine:
        engines.append(engine_of(watchdog, **options))
        await engines[-1].start()
        return engines[-1]

    yield _start
    for engine in engines:
        await engine.stop()


def submit(engine: ProcessEngine, prompt: list[int], *, max_tokens: int = 2, n: int = 1) -> RequestStream:
    params = SamplingParams(max_tokens=max_tokens)
    return engine.submit([AddRequest(engine.new_ids(n), prompt, params, arrival_time=time.monotonic())])


async def ends(stream: RequestStream) -> list[str]:
    """How the samples of a call ended, in no order: a finish reason, or an error's code."""
    outputs: list[RequestOutput] = [output async for some in stream for output in some]
    return [o.error.code if o.error else str(o.finish_reason) for o in outputs if o.finish_reason is not None]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_step_that_was_expected_to_take_long_is_neither_slow_nor_hung(start: Start) -> None:
    engine = await start(
        WatchdogConfig(ready_timeout=0.5, timeout=1.5), latency={"per_prefill_token": 0.02}, prefix_caching=False
    )
    assert await ends(submit(engine, [1] * 20)) == ["length"]  # from this one the pace is known
    long = submit(engine, [2] * 160)
    await until(lambda: engine.liveness.step_seconds > 1.5)
    assert engine.ready
    assert await ends(long) == ["length"]
    assert engine.num_restarts == 0


async def test_a_step_that_takes_unexpectedly_long_is_slow_and_is_waited_for(start: Start) -> None:
    engine = await start(WatchdogConfig(ready_timeout=0.5, timeout=30), faults=f"slow={MARKER}:1.5")
    slow = submit(engine, [MARKER])
    await until(lambda: not engine.ready)
    assert await ends(slow) == ["length"]
    await until(lambda: engine.ready)
    assert engine.num_restarts == 0


@pytest.mark.parametrize("own_thread", [None, False, True], ids=["our scheduler", "its own", "its own thread"])
async def test_a_stall_ends_with_one_error_each_and_a_new_process(
    start: Start, caplog: pytest.LogCaptureFixture, own_thread: bool | None
) -> None:
    own = {} if own_thread is None else {"own_thread": own_thread, "max_num_seqs": 3}
    engine = await start(WatchdogConfig(ready_timeout=0.5, timeout=1.5), faults=f"stall={MARKER}", **own)
    stalled = engine.pid
    streams = [submit(engine, [1], max_tokens=5000), submit(engine, [2, MARKER], n=3)]
    await until(lambda: not engine.ready)
    streams.append(submit(engine, [3]))
    assert [await ends(stream) for stream in streams] == [
        ["engine_dead"],
        ["engine_dead"] * 3,
        ["engine_dead"],
    ]
    await until(lambda: engine.ready)
    assert engine.num_restarts == 1
    assert engine.pid != stalled
    assert "its step has taken" in caplog.text
    assert await ends(submit(engine, [1])) == ["length"]


# -- loading

HANGS = """
import ctypes, os, threading
from pathlib import Path
from penstock.engines import registry

def load_core(*given, load=registry.load_core):
    how = Path(os.environ["LOAD_FAULT"])
    if how.exists() and how.read_text() == "waits":
        threading.Event().wait()
    elif how.exists():
        ctypes.PyDLL(None).pause()  # native code that does not let go of the interpreter's lock
    return load(*given)

registry.load_core = load_core
"""


@pytest.fixture
def load_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """While this file is there, loads hang; it says how. Python's start-up hook brings that about."""
    (tmp_path / "sitecustomize.py").write_text(HANGS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("LOAD_FAULT", str(tmp_path / "fault"))
    return tmp_path / "fault"


@pytest.mark.parametrize("how", ["waits", "holds the lock"])
async def test_a_load_that_hangs_is_ended_and_says_why(load_fault: Path, how: str) -> None:
    load_fault.write_text(how)
    engine = engine_of(WatchdogConfig(load_timeout=1.0))
    with pytest.raises(EngineError, match=r"not loaded within 1 s \(load-timeout\); .* sign of life .* \d"):
        await engine.start()
    assert not children(os.getpid(), "penstock.engines.process.worker")
    await engine.stop()


async def test_loads_that_hang_count_until_the_engine_stays_down(start: Start, load_fault: Path) -> None:
    engine = await start(WatchdogConfig(max_restarts=2, restart_window=0.5))
    # however long its loads take: no account is cleared by them
    engine._watchdog = msgspec.structs.replace(engine._watchdog, load_timeout=0.6)
    load_fault.write_text("waits")
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: engine.failed)
    assert engine.num_restarts == 2
    with pytest.raises(NotReadyError, match="stays down"):
        submit(engine, [1])


async def test_an_engine_that_did_not_load_once_may_be_back(start: Start, load_fault: Path) -> None:
    engine = await start(WatchdogConfig())
    patient = engine._watchdog
    engine._watchdog = msgspec.structs.replace(patient, load_timeout=0.3)
    load_fault.write_text("waits")
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: engine.num_restarts == 1)
    load_fault.unlink()
    engine._watchdog = patient
    await until(lambda: engine.ready)
    assert await ends(submit(engine, [1])) == ["length"]


async def test_the_process_takes_along_what_it_has_started(start: Start, load_fault: Path) -> None:
    """A compiler that hangs holds up a load, and must not outlive it."""
    child = load_fault.parent / "child"
    script = f"import subprocess\np = subprocess.Popen(['sleep', '600'])\nopen({str(child)!r}, 'w').write(str(p.pid))\n"
    (load_fault.parent / "sitecustomize.py").write_text(script + HANGS)
    load_fault.write_text("waits")
    engine = engine_of(WatchdogConfig(load_timeout=3.0))
    with pytest.raises(EngineError, match="not loaded"):
        await engine.start()
    pid = int(child.read_text())
    await until(lambda: not is_running(pid))
    await engine.stop()
