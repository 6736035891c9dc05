"""What an engine process leaves behind when it dies, hangs, or does not load."""

from __future__ import annotations

import asyncio
import csv
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.messages import AddRequest, SamplingParams
from penstock.engines.errors import EngineError
from penstock.engines.host.crash_folder import crashes
from penstock.engines.process.client import ProcessEngine
from penstock.engines.process.liveness import WatchdogConfig
from penstock.engines.registry import EngineSpec

MARKER = 7
WORD = 31337
"""A token of a prompt, which must not be found in any evidence."""
Start = Callable[..., Awaitable[ProcessEngine]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    engines: list[ProcessEngine] = []

    async def _start(
        watchdog: WatchdogConfig | None = None,
        folder: Path = tmp_path / "crashes",
        scheduling: str = "auto",
        **own: Any,
    ) -> ProcessEngine:
        options = {"num_blocks": 512, "first_token_id": 100, "latency": {"per_step": 0.002}, **own}
        spec = EngineSpec(runner="simulated", scheduling=scheduling, options=options)  # type: ignore[arg-type]
        engines.append(ProcessEngine(spec, watchdog, name="org/model", crash_folder=folder))
        await engines[-1].start()
        return engines[-1]

    yield _start
    for engine in engines:
        await engine.stop()


def submit(engine: ProcessEngine, prompt: list[int], max_tokens: int = 4000) -> RequestStream:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return engine.submit([AddRequest(engine.new_ids(1), prompt, params, arrival_time=time.monotonic())])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def evidence(folder: Path) -> tuple[dict[str, Any], list[dict[str, str]], str]:
    """The report, the steps and the stacks of the one crash."""
    await until(lambda: folder.is_dir() and bool(crashes(folder)))
    [place] = crashes(folder)
    with (place / "steps.csv").open() as file:
        steps = list(csv.DictReader(file))
    return json.loads((place / "report.json").read_text()), steps, (place / "stacks.txt").read_text()


@pytest.mark.parametrize("scheduling", ["penstock", "engine"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
async def test_an_engine_that_dies(start: Start, tmp_path: Path, number: signal.Signals, scheduling: str) -> None:
    engine = await start(scheduling=scheduling)
    stream = submit(engine, [WORD, 300])
    await stream.__anext__()
    assert engine.pid is not None
    os.kill(engine.pid, number)
    report, steps, stacks = await evidence(tmp_path / "crashes")
    assert (report["kind"], report["name"], report["signal"]) == ("engine", "org/model", number.name)
    assert report["settings"]["runner"] == "simulated"
    assert [int(step["number"]) for step in steps] == list(range(1, len(steps) + 1))
    assert {step["num_requests"] for step in steps} == {"1"}
    assert float(steps[0]["seconds"]) > 0
    assert ("worker.py" in stacks) == (number != signal.SIGKILL)
    assert str(WORD) not in stacks + json.dumps(report["settings"])
    await until(lambda: engine.ready)
    assert engine.num_restarts == 1


async def test_an_engine_that_hangs_says_where(start: Start, tmp_path: Path) -> None:
    engine = await start(WatchdogConfig(ready_timeout=0.5, timeout=1.5), faults=f"stall={MARKER}")
    submit(engine, [MARKER])
    report, steps, stacks = await evidence(tmp_path / "crashes")
    assert report["status"] is None
    assert "its step has taken" in report["reason"]
    assert float(steps[-1]["seconds"]) == 0, "it is under way"
    assert "simulated" in stacks
    await until(lambda: engine.ready)


async def test_an_engine_that_dies_while_it_loads(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = "from penstock.engines import registry\n"
    hook += "def load_core(*_):\n    import ctypes\n    ctypes.string_at(0)\nregistry.load_core = load_core\n"
    (tmp_path / "sitecustomize.py").write_text(hook)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with pytest.raises(EngineError, match=r"ended while it loaded the model \(SIGSEGV\)"):
        await start()
    report, steps, stacks = await evidence(tmp_path / "crashes")
    assert report["signal"] == "SIGSEGV"
    assert steps == []
    assert "in load_core" in stacks


async def test_an_engine_that_is_stopped_leaves_nothing(start: Start, tmp_path: Path) -> None:
    engine = await start()
    await engine.stop()
    assert not (tmp_path / "crashes").exists()


async def test_where_nothing_can_be_kept_the_engine_comes_back_all_the_same(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    engine = await start(folder=tmp_path / "file")
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: engine.num_restarts == 1 and engine.ready)
    await until(lambda: "no crash report of engine org/model could be written" in caplog.text)
