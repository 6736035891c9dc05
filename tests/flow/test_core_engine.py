"""An engine that schedules by itself in this process: stepped, and with a thread and a descriptor of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from penstock.engines.autonomous.core import AutonomousCore
from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.messages import AddRequest, FinishReason, SamplingParams
from penstock.engines.errors import EngineDeadError, InvalidRequestError, NotReadyError
from penstock.engines.registry import EngineSpec, load_core
from penstock.engines.scheduler.config import SchedulerConfig
from support.engine import whole_output
from support.inline_engine import CoreEngine
from unit.engines.scheduler.harness import FIRST, RAISE, VOCAB, alone

Make = Callable[..., CoreEngine[AutonomousCore]]


@pytest.fixture(params=[False, True], ids=["stepped", "by itself"])
async def make(request: pytest.FixtureRequest) -> AsyncIterator[Make]:
    engines = []

    async def _make(**options: object) -> CoreEngine[AutonomousCore]:
        settings = {
            "vocab_size": VOCAB,
            "first_token_id": FIRST,
            "own_thread": request.param,
            "faults": f"raise={RAISE}",
            **options,
        }
        spec = EngineSpec(
            runner="simulated", scheduling="engine", options=settings, scheduler=SchedulerConfig(max_num_seqs=2)
        )
        core = load_core(spec, time.monotonic)
        assert isinstance(core, AutonomousCore)
        engines.append(CoreEngine(core))
        await engines[-1].start()
        return engines[-1]

    yield _make
    for engine in engines:
        await engine.stop()


def submit(
    engine: CoreEngine[AutonomousCore], prompt: list[int], max_tokens: int, patience: float = 60
) -> RequestStream:
    now = time.monotonic()
    return engine.submit(
        [
            AddRequest(
                engine.new_ids(1), prompt, SamplingParams(max_tokens=max_tokens, temperature=0), now, now + patience
            )
        ]
    )


async def test_requests_get_their_tokens(make: Make) -> None:
    engine = await make()
    outputs = await asyncio.gather(*(whole_output(submit(engine, [i], 5 + i)) for i in range(6)))
    assert [output.token_ids for output in outputs] == [
        alone([i], SamplingParams(max_tokens=5 + i, temperature=0))[0] for i in range(6)
    ]
    assert engine.stats.finished == {"length": 6}


async def test_deadlines_need_no_step(make: Make) -> None:
    engine = await make(latency={"per_step": 0.001}, abort_after=None, max_model_len=100_000)
    streams = [submit(engine, [1], 10_000, 0.2), submit(engine, [2], 10_000, 0.3), submit(engine, [3], 5, 0.4)]
    codes = [output.error.code for stream in streams if (output := await whole_output(stream)).error is not None]
    assert codes == ["deadline_exceeded"] * 3


async def test_an_engine_beyond_repair_ends_everything(make: Make) -> None:
    engine = await make(latency={"per_step": 0.01})
    streams = [submit(engine, [1], 5000), submit(engine, [2], 5000), submit(engine, [RAISE], 5)]
    await anext(streams[0])
    engine.abort(list(streams[1].live_ids))
    outputs = [await whole_output(stream) for stream in streams]
    assert [output.finish_reason for output in outputs] == [FinishReason.ERROR, FinishReason.ABORT, FinishReason.ERROR]
    assert [output.error.code for output in outputs if output.error is not None] == ["step_failed"] * 2
    while not engine.failed:
        await asyncio.sleep(0)
    with pytest.raises(NotReadyError):
        submit(engine, [1], 5)
    with pytest.raises(NotReadyError):
        await engine.load_adapter("a:1", Path("/x"))


async def test_an_unloaded_adapter_leaves_its_slot_and_a_stop_ends_a_load(make: Make, tmp_path: Path) -> None:
    engine = await make(max_loras=1)
    with pytest.raises(InvalidRequestError):
        await engine.load_adapter("a:1", tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    await engine.load_adapter("a:1", tmp_path)
    await engine.unload_adapter("a:1")
    await engine.load_adapter("b:1", tmp_path)
    call = asyncio.create_task(engine.load_adapter("c:1", tmp_path))
    await engine.stop()
    with pytest.raises((EngineDeadError, NotReadyError)):
        await call
