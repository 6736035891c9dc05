"""An emptied prefix cache: what comes later is computed again, and what runs is not harmed."""

from __future__ import annotations

import asyncio

import pytest

from penstock.engines.autonomous.core import AutonomousCore
from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.messages import AddRequest, SamplingParams
from penstock.engines.errors import UnsupportedError
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.simulated import SimulatedConfig, SimulatedRunner
from penstock.engines.simulated.batcher import SimulatedBatcher, SimulatedBatcherConfig
from penstock.engines.simulated.own_thread import OwnThread
from support.inline_engine import CoreEngine, InlineEngine

PROMPT = list(range(10, 30))
LIMITS = SchedulerConfig(max_num_seqs=4, max_queued_requests=8)
SIZES = {"vocab_size": 100, "block_size": 4, "num_blocks": 64}


def engine(kind: str) -> CoreEngine[object]:
    if kind == "runner":
        return InlineEngine(SimulatedRunner(SimulatedConfig(**SIZES)), LIMITS)
    batcher = SimulatedBatcher(SimulatedBatcherConfig(**SIZES))
    return CoreEngine(AutonomousCore(OwnThread(batcher) if kind == "own thread" else batcher, LIMITS, lambda: 0.0))


def submit(engine: CoreEngine[object], max_tokens: int) -> RequestStream:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return engine.submit([AddRequest(engine.new_ids(1), PROMPT, params, arrival_time=0.0)])


async def read(stream: RequestStream) -> tuple[list[int], int]:
    """Its tokens, and how many of its prompt were cached."""
    tokens: list[int] = []
    cached = 0
    async for outputs in stream:
        for output in outputs:
            tokens += output.token_ids
            cached = output.prompt.num_cached_tokens if output.prompt is not None else cached
    return tokens, cached


@pytest.mark.parametrize("kind", ["runner", "own scheduler"])
async def test_prompts_are_computed_again(kind: str) -> None:
    served = engine(kind)
    await served.start()
    try:
        first, _ = await read(submit(served, 4))
        assert await read(submit(served, 4)) == (first, 19)
        running = asyncio.create_task(read(submit(served, 40)))
        await served.reset_prefix_cache()
        assert (await running)[0][:4] == first
        await served.reset_prefix_cache()
        assert await read(submit(served, 4)) == (first, 0)
        assert await read(submit(served, 4)) == (first, 19)
    finally:
        await served.stop()


async def test_engines_that_cannot_say_so() -> None:
    served = engine("own thread")
    await served.start()
    try:
        with pytest.raises(UnsupportedError, match="prefix cache"):
            await served.reset_prefix_cache()
        assert await read(submit(served, 4))
    finally:
        await served.stop()
