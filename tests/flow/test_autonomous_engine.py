"""A real engine process whose engine schedules by itself, stepped by our loop or running in a thread of its own."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.messages import AddRequest, FinishReason, RequestOutput, SamplingParams
from penstock.engines.errors import EngineDeadError, InvalidRequestError, OverloadedError, UnsupportedError
from penstock.engines.process.client import ProcessEngine
from penstock.engines.process.liveness import WatchdogConfig
from penstock.engines.registry import EngineSpec
from penstock.engines.scheduler.config import SchedulerConfig
from unit.engines.scheduler.harness import FIRST, VOCAB, alone

MARKER = 901
"""A token that the model never says."""
SLOW = {"latency": {"per_step": 0.02}}
Start = Callable[..., Awaitable[ProcessEngine]]


@pytest.fixture(params=["stepped", "by itself"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def start(kind: str) -> AsyncIterator[Start]:
    engines: list[ProcessEngine] = []

    async def _start(
        *, limits: dict[str, object] | None = None, watchdog: WatchdogConfig | None = None, **options: object
    ) -> ProcessEngine:
        spec = EngineSpec(
            runner="simulated",
            scheduling="engine",
            options={"vocab_size": VOCAB, "first_token_id": FIRST, "own_thread": kind == "by itself", **options},
            scheduler=SchedulerConfig(**limits or {}),  # type: ignore[arg-type]
            publish_interval=0.01,
        )
        engines.append(ProcessEngine(spec, watchdog))
        await engines[-1].start()
        return engines[-1]

    yield _start
    for engine in engines:
        await engine.stop()


def submit(
    engine: ProcessEngine,
    prompt: list[int],
    max_tokens: int = 8,
    n: int = 1,
    *,
    patience: float | None = None,
    adapter: str = "",
) -> RequestStream:
    now = time.monotonic()
    deadline = None if patience is None else now + patience
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    return engine.submit([AddRequest(engine.new_ids(n), prompt, params, now, deadline, adapter=adapter)])


async def test_it_shows_its_queue(start: Start) -> None:
    engine = await start(limits={"max_num_seqs": 1}, **SLOW)
    streams = [submit(engine, [number], max_tokens=200) for number in range(2)]
    [view] = await engine.inspect()
    while view is None or [row.status for row in view.requests] != ["running", "waiting"]:
        [view] = await engine.inspect()
    assert [row.waits_for for row in view.requests] == ["", "turn"]
    assert view.blocks is None
    for stream in streams:
        stream.close()


async def collect(stream: RequestStream) -> dict[int, RequestOutput]:
    """Each id's tokens in one output, its last."""
    results: dict[int, RequestOutput] = {}
    async with asyncio.timeout(60):
        async for outputs in stream:
            for output in outputs:
                if output.id in results:
                    output.token_ids = results[output.id].token_ids + output.token_ids
                results[output.id] = output
    return results


async def code_of(stream: RequestStream) -> str | None:
    [output] = (await collect(stream)).values()
    return output.error.code if output.error is not None else None


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.01)


async def test_many_streams_get_their_own_tokens(start: Start) -> None:
    engine = await start(limits={"max_num_seqs": 8}, num_blocks=40, block_size=4)
    prompts = [[i % 5, i // 5, 1] * (1 + i % 4) for i in range(30)]
    results = await asyncio.gather(*(collect(submit(engine, p, 3 + i, n=2)) for i, p in enumerate(prompts)))
    for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        expected = alone(prompt, SamplingParams(max_tokens=3 + i, temperature=0))[0]
        assert [output.token_ids for output in result.values()] == [expected] * 2
    stats = engine.stats
    assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, stats.num_blocks)
    assert stats.finished == {"length": 60}


async def test_tokens_come_while_the_request_runs_and_not_one_by_one(start: Start) -> None:
    """Steps of half a millisecond, messages every 10 ms: several, and several tokens in each of most."""
    engine = await start(latency={"per_step": 0.0005})
    messages: list[int] = []
    deliver = engine._streams.deliver
    engine._streams.deliver = lambda outputs: (messages.append(len(outputs)), deliver(outputs))[1]  # type: ignore
    stream = submit(engine, [1, 2], max_tokens=1000)
    [first] = await anext(stream)
    assert first.prompt is not None
    assert first.finish_reason is None
    [output] = (await collect(stream)).values()
    assert len(first.token_ids) + len(output.token_ids) == 1000
    assert 5 < len([count for count in messages if count]) < 500


async def test_a_storm_of_aborts_leaves_nothing_behind(start: Start) -> None:
    engine = await start(
        limits={"max_num_seqs": 4}, abort_after=3, num_blocks=64, block_size=4, latency={"per_step": 0.001}
    )
    rng = random.Random(1)

    async def give_up_in_the_middle(stream: RequestStream, after: int) -> dict[int, RequestOutput]:
        """Some before their first token, some never."""
        for _ in range(after):
            if stream.live_ids:
                await anext(stream)
        engine.abort(list(stream.live_ids))
        return await collect(stream)

    streams = [submit(engine, [i % 8, 1], max_tokens=60, n=1 + i % 2) for i in range(40)]
    pending = [give_up_in_the_middle(stream, rng.choice([0, 1, 2, 3, 100])) for stream in streams]
    results = [output for result in await asyncio.gather(*pending) for output in result.values()]
    assert {output.finish_reason for output in results} >= {FinishReason.ABORT}
    await until(lambda: engine.stats.num_running == 0)
    assert engine.stats.num_free_blocks == engine.stats.num_blocks
    assert engine.stats.admitted == 60 == sum(engine.stats.finished.values())


async def test_deadlines_hold_while_waiting_and_while_running(start: Start) -> None:
    engine = await start(limits={"max_num_seqs": 1}, latency={"per_step": 0.005})
    running = submit(engine, [1], max_tokens=30_000, patience=2.0)
    await anext(running)
    started = time.monotonic()
    assert await code_of(submit(engine, [2], patience=0.2)) == "deadline_exceeded"
    assert time.monotonic() - started >= 0.2
    assert running.live_ids
    assert await code_of(running) == "deadline_exceeded"
    assert await code_of(submit(engine, [2])) is None


async def test_deadlines_hold_although_the_engine_is_silent(start: Start, kind: str) -> None:
    """The seats are full of what was given up and never comes back: there is nothing to wake up for."""
    if kind == "stepped":
        pytest.skip("it is never silent: it is stepped while it holds a request")
    engine = await start(limits={"max_num_seqs": 1}, abort_after=None)
    async with submit(engine, [1], max_tokens=30_000) as stream:
        await anext(stream)
    started = time.monotonic()
    assert await code_of(submit(engine, [2], patience=0.3)) == "deadline_exceeded"
    assert time.monotonic() - started >= 0.3
    assert engine.ready


async def test_a_full_queue_says_when_to_come_back(start: Start) -> None:
    engine = await start(limits={"max_num_seqs": 2, "max_queued_requests": 3}, **SLOW)
    streams = [submit(engine, [i], max_tokens=20) for i in range(8)]
    results = [output for stream in streams for output in (await collect(stream)).values()]
    errors = [output.error for output in results if output.error is not None]
    assert [error.code for error in errors] == ["queue_full"] * 3
    assert all(error.retry_after for error in errors)


async def test_kill_9_ends_every_stream_at_once_and_the_engine_comes_back(start: Start) -> None:
    engine = await start(limits={"max_num_seqs": 3}, **SLOW)
    streams = [submit(engine, [i], max_tokens=6000) for i in range(6)]
    await anext(streams[0])
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    async with asyncio.timeout(20):  # the watchdog would take a minute
        assert [await code_of(stream) for stream in streams] == ["engine_dead"] * 6
    await until(lambda: engine.ready)
    assert engine.num_restarts == 1
    assert engine.info.num_blocks == 8192
    assert await code_of(submit(engine, [1])) is None


async def test_an_engine_beyond_repair_gets_a_new_process(start: Start) -> None:
    engine = await start(limits={"max_num_seqs": 2}, faults=f"raise={MARKER}", **SLOW)
    runs = submit(engine, [1], max_tokens=6000)
    await anext(runs)
    bad, waits = submit(engine, [MARKER]), submit(engine, [2])
    assert [await code_of(stream) for stream in (runs, bad, waits)] == ["step_failed", "step_failed", "engine_dead"]
    await until(lambda: engine.num_restarts == 1 and engine.ready)
    assert await code_of(submit(engine, [1])) is None


async def test_an_idle_engine_stays_ready_by_its_heart_beats(start: Start) -> None:
    engine = await start(watchdog=WatchdogConfig(timeout=3.0, ready_timeout=2.5))
    assert await code_of(submit(engine, [1])) is None
    deadline = time.monotonic() + 3.5
    await until(lambda: time.monotonic() > deadline)
    assert engine.ready
    assert engine.num_restarts == 0


# -- LoRA adapters ---------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "adapter_config.json").write_text("{}")
    return tmp_path


async def test_adapters_come_and_go_and_survive_a_restart(start: Start, folder: Path) -> None:
    engine = await start(max_loras=2, adapters={"old:1": str(folder)})
    await engine.load_adapter("new:1", folder)
    with pytest.raises(OverloadedError):
        await engine.load_adapter("third:1", folder)
    await engine.unload_adapter("old:1")
    await engine.load_adapter("third:1", folder)
    [output] = (await collect(submit(engine, [1, 2], adapter="new:1"))).values()
    assert output.token_ids == alone([1, 2], SamplingParams(max_tokens=8, temperature=0), adapter="new:1")[0]
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    await until(lambda: engine.num_restarts == 1 and engine.ready)
    with pytest.raises(OverloadedError):  # new:1 and third:1 are there again, and old:1 is not
        await engine.load_adapter("fourth:1", folder)
    await engine.unload_adapter("third:1")
    await engine.load_adapter("fourth:1", folder)


async def test_what_does_not_load_is_told_and_hurts_nobody(start: Start, tmp_path: Path) -> None:
    engine = await start(max_loras=1)
    with pytest.raises(InvalidRequestError, match="adapter_config"):
        await engine.load_adapter("a:1", tmp_path / "nowhere")
    await engine.unload_adapter("never:1")
    assert await code_of(submit(engine, [1])) is None


async def test_an_engine_without_room_for_adapters_refuses_them(start: Start, folder: Path) -> None:
    engine = await start()
    with pytest.raises(UnsupportedError):
        await engine.load_adapter("a:1", folder)


async def test_a_call_under_way_ends_with_its_process(start: Start, folder: Path) -> None:
    engine = await start(max_loras=1)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    call = asyncio.create_task(engine.load_adapter("a:1", folder))
    await asyncio.sleep(0)
    os.kill(engine.pid, signal.SIGKILL)
    async with asyncio.timeout(20):  # the watchdog would take a minute
        with pytest.raises(EngineDeadError):
            await call
    await until(lambda: engine.num_restarts == 1 and engine.ready)
    await engine.load_adapter("a:2", folder)
