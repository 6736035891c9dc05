"""LoRA adapters that load while an engine serves, seen by the engine's client: nobody is held up who need not wait."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.autonomous.core import AutonomousCore
from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.messages import AddRequest, FinishReason, RequestOutput, SamplingParams
from penstock.engines.core import EngineCore
from penstock.engines.errors import EngineDeadError, InvalidRequestError
from penstock.engines.registry import EngineSpec, load_core
from penstock.engines.scheduler.config import SchedulerConfig
from support.adapters import save_adapter
from support.engine import whole_output
from support.inline_engine import CoreEngine

ENDLESS = 30_000


class Served:
    """A simulated engine with one seat, in which loads are held back until they are let go."""

    def __init__(self, **spec: Any) -> None:
        options = {"max_loras": 2, "max_model_len": ENDLESS + 10, **spec.pop("options", {})}
        limits = SchedulerConfig(max_num_seqs=1)
        core = load_core(EngineSpec(runner="simulated", options=options, scheduler=limits, **spec), time.monotonic)
        assert isinstance(core, EngineCore | AutonomousCore)
        self.core = core
        self.intake = core.scheduler.intake if isinstance(core, EngineCore) else core.intake
        self.engine = CoreEngine(core)
        self._gate = threading.Semaphore(0)
        host: Any = core.runner if isinstance(core, EngineCore) else core.batcher
        self._prepare, host.prepare_adapter = host.prepare_adapter, self._held

    def _held(self, key: str, folder: Path) -> object:
        assert self._gate.acquire(timeout=30)
        return self._prepare(key, folder)

    def let_go(self) -> None:
        self._gate.release()

    async def loading(self, key: str, folder: Path) -> asyncio.Task[None]:
        """A load that has reached the engine."""
        task = asyncio.create_task(self.engine.load_adapter(key, folder))
        while key not in self.core.adapters.under_way:
            await asyncio.sleep(0)
        return task

    def ask(self, adapter: str = "", max_tokens: int = 4, n: int = 1, patience: float = 60) -> RequestStream:
        now, params = time.monotonic(), SamplingParams(max_tokens=max_tokens, temperature=0.0)
        ids = self.engine.new_ids(n)
        return self.engine.submit([AddRequest(ids, [1, 2, 3], params, now, now + patience, adapter=adapter)])


@pytest.fixture(
    params=[
        {},
        {"scheduling": "engine"},
        {"scheduling": "engine", "options": {"own_thread": True, "latency": {"per_step": 1e-4}}},
    ],
    ids=["penstock's scheduler", "its own, stepped", "its own, by itself"],
)
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    served = Served(**request.param)
    await served.engine.start()
    yield served
    for _ in range(2):
        served.let_go()
    await served.engine.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_adapter(tmp_path / "adapter")


async def test_streams_go_on_and_who_waits_keeps_its_place(served: Served, folder: Path) -> None:
    load = await served.loading("a:1", folder)
    waits, runs, last = served.ask("a:1"), served.ask(max_tokens=ENDLESS), served.ask()
    async with asyncio.timeout(30):
        await anext(runs)  # it came later
        await anext(runs)
    served.let_go()
    await load
    order: list[str] = []

    async def note(name: str, stream: RequestStream) -> RequestOutput:
        output = await whole_output(stream)
        order.append(name)
        return output

    ends = [asyncio.create_task(note(*each)) for each in (("waits", waits), ("last", last))]
    assert served.engine.stats.num_waiting == 2
    served.engine.abort(list(runs.live_ids))
    adapted, plain = await asyncio.gather(*ends)
    assert order == ["waits", "last"]
    assert [adapted.finish_reason, plain.finish_reason] == [FinishReason.LENGTH] * 2
    assert adapted.token_ids != plain.token_ids
    assert adapted.token_ids == (await whole_output(served.ask("a:1"))).token_ids


async def test_who_waits_for_an_adapter_that_does_not_load_is_told(served: Served, tmp_path: Path) -> None:
    load = await served.loading("a:1", tmp_path)
    waits, other = served.ask("a:1"), served.ask()
    assert (await whole_output(other)).finish_reason is FinishReason.LENGTH
    served.let_go()
    with pytest.raises(InvalidRequestError, match=r"holds no adapter_config\.json"):
        await load
    error = (await whole_output(waits)).error
    assert error is not None
    assert (error.code, error.message[:50]) == ("invalid_request", "The request's LoRA adapter could not be loaded: Th")


async def test_who_waits_can_leave(served: Served, folder: Path) -> None:
    load = await served.loading("a:1", folder)
    leaves, stays = served.ask("a:1"), served.ask("a:1")
    await whole_output(served.ask())
    served.engine.abort(list(leaves.live_ids))
    assert (await whole_output(leaves)).finish_reason is FinishReason.ABORT
    served.let_go()
    await load
    assert (await whole_output(stays)).finish_reason is FinishReason.LENGTH


async def test_time_runs_out_while_an_adapter_loads(served: Served, folder: Path) -> None:
    load = await served.loading("a:1", folder)
    error = (await whole_output(served.ask("a:1", patience=0.05))).error  # the engine has nothing else to do
    assert error is not None
    assert error.code == "deadline_exceeded"
    served.let_go()
    await load
    assert (await whole_output(served.ask("a:1"))).finish_reason is FinishReason.LENGTH


async def test_an_adapter_that_is_unloaded_while_it_loads(served: Served, folder: Path) -> None:
    load = await served.loading("a:1", folder)
    waits = served.ask("a:1")
    await served.engine.unload_adapter("a:1")
    with pytest.raises(InvalidRequestError, match="unloaded before it had loaded"):
        await load
    error = (await whole_output(waits)).error
    assert error is not None
    assert "unloaded before it had loaded" in error.message


async def test_an_engine_that_stops_ends_what_loads(
    served: Served, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.engines.adapter_loading._FAREWELL", 0.01)
    load = await served.loading("a:1", folder)
    waits = served.ask("a:1")
    await served.engine.stop()
    with pytest.raises(EngineDeadError):
        await load
    error = (await whole_output(waits)).error
    assert error is not None
    assert error.code == "engine_dead"
