"""A benchmark of replicas that compute prompts for other ones: when that pays, and what a hand-over costs.

`python loadtest/benchmarks handover [MODEL]`

While some streams generate, long prompts come one after the other. The same is asked of one engine with all cores, of
two replicas, and of two of which one computes the prompts, in turns.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from penstock.engines.client.engine import Engine
from penstock.engines.contract.messages import AddRequest, SamplingParams
from penstock.engines.handover.memory import HandoverMemory
from penstock.engines.handover.shared_blocks import OwnRegion, SharedBlocks, SharedRegion, num_slots
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.runner import OpenVINORunner
from penstock.gateway.configuration.config import load_config
from penstock.gateway.models.language.model_builder import ModelBuilder
from penstock.gateway.models.language.models import find_model

SETUPS: dict[str, dict[str, Any]] = {
    "one engine": {},
    "two replicas": {"replicas": 2},
    "prefill and decode": {"replicas": 2, "prefill_replicas": 1},
}
_STREAM_PROMPT, _ANSWER, _SETTLED = 16, 8, 4
_KV_TOKENS, _LONGEST = 1000, 4096
_STEP_MS, _PREFILL_US = 10.0, 1000.0
"""Of a simulated engine that has the whole machine: of a step, and of each token of a prompt."""


def request(engine: Engine, rng: random.Random, prompt: int, answer: int) -> AddRequest:
    tokens = [rng.randrange(300, 3000) for _ in range(prompt)]
    params = SamplingParams(max_tokens=answer, temperature=0, ignore_eos=True)
    return AddRequest(engine.new_ids(1), tokens, params, arrival_time=time.monotonic())


class Stream:
    """One that generates until it is cut off."""

    def __init__(self, engine: Engine, message: AddRequest) -> None:
        self.times: list[float] = []
        """Of each token, in seconds."""
        self.settled = asyncio.Event()
        """It has its first tokens."""
        self._stream = engine.submit([message])
        self._task = asyncio.create_task(self.read())

    async def read(self) -> None:
        async for outputs in self._stream:
            for output in outputs:
                if output.error is not None:
                    raise output.error.raised()
            self.times += [time.perf_counter()] * sum(len(output.token_ids) for output in outputs)
            if len(self.times) >= _SETTLED:
                self.settled.set()

    async def begun(self) -> None:
        """Raises what ended it before."""
        settled = asyncio.create_task(self.settled.wait())
        await asyncio.wait((settled, self._task), return_when=asyncio.FIRST_COMPLETED)
        if not settled.done():
            settled.cancel()
            await self._task

    async def cut_off(self) -> None:
        self._stream.close()
        await self._task


async def long_prompts(engine: Engine, rng: random.Random, count: int, prompt: int) -> list[float]:
    """Seconds to the first token of each, one after the other."""
    prompts = []
    for _ in range(count):
        began, first = time.perf_counter(), None
        async for outputs in engine.submit([request(engine, rng, prompt, _ANSWER)]):
            if first is None and any(output.token_ids for output in outputs):
                first = time.perf_counter() - began
        assert first is not None
        prompts.append(first)
    return prompts


async def measure(engine: Engine, settings: Mapping[str, Any], seed: int) -> dict[str, float]:
    rng = random.Random(seed)
    await long_prompts(engine, rng, 1, settings["prompt"])
    room = min(engine.info.context_length, _LONGEST) - _STREAM_PROMPT
    streams = [Stream(engine, request(engine, rng, _STREAM_PROMPT, room)) for _ in range(settings["streams"])]
    for stream in streams:
        await stream.begun()
    began = time.perf_counter()
    ttfts = await long_prompts(engine, rng, settings["prompts"], settings["prompt"])
    seconds = time.perf_counter() - began
    times = [[at for at in stream.times if began <= at <= began + seconds] for stream in streams]
    for stream in streams:
        await stream.cut_off()
    gaps = sorted(after - before for arrivals in times for before, after in pairwise(arrivals))
    return {
        "itl_p50_ms": 1e3 * statistics.median(gaps),
        "itl_p99_ms": 1e3 * gaps[int(0.99 * (len(gaps) - 1))],
        "itl_max_ms": 1e3 * gaps[-1],
        "ttft_ms": 1e3 * statistics.median(ttfts),
        "prompt_tokens_per_s": settings["prompts"] * settings["prompt"] / seconds,
        "stream_tokens_per_s": sum(map(len, times)) / seconds,
    }


async def run(setup: str, settings: Mapping[str, Any], seed: int) -> dict[str, float]:
    flags = SETUPS[setup] | {"num_kv_blocks": 1024}
    if settings["simulated"]:
        share = 1 / SETUPS[setup].get("replicas", 1)  # of the machine, for each engine
        flags |= {"engine": "simulated", "sim_step_ms": _STEP_MS / share, "sim_prefill_us": _PREFILL_US / share}
    else:
        flags |= {"weights": settings["weights"]}
    engine = ModelBuilder().build(load_config(flags, environ={}).models, find_model(settings["model"])).engine
    await engine.start()
    try:
        return await measure(engine, settings, seed)
    finally:
        await engine.stop()


def copies(settings: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds of a CPU that a hand-over of 1,000 tokens takes, by its parts."""
    folder = Path(find_model(settings["model"]).folder)
    runner = OpenVINORunner(OpenVINOConfig(model_dir=folder, num_blocks=512, weights=settings["weights"]))
    size = runner.info.block_size
    blocks, hashes = list(range(-(-_KV_TOKENS // size))), [random.randbytes(16) for _ in range(-(-_KV_TOKENS // size))]
    region_bytes = 4 * len(blocks) * runner.block_bytes
    memory = HandoverMemory(1, region_bytes)
    config = memory.config(0)
    slots = num_slots(region_bytes, runner.block_bytes)
    own = OwnRegion(config.regions[0], slots, runner.block_bytes, config.key)
    shared = SharedBlocks([SharedRegion(config.regions[0], slots, runner.block_bytes, config.key)], len(blocks))
    parts: dict[str, list[float]] = {}
    for _ in range(settings["repeat"] + 1):
        times = [time.process_time()]
        contents = runner.read_blocks(blocks)
        for block_hash, block in zip(hashes, contents, strict=True):
            own.write(block_hash, block)
        times.append(time.process_time())
        copied = [shared.read(shared.use(block_hash), block_hash) for block_hash in hashes]
        times.append(time.process_time())
        runner.write_blocks(blocks, [block for block in copied if block is not None])
        times.append(time.process_time())
        for name, (before, after) in zip(("export_ms", "read_ms", "import_ms"), pairwise(times), strict=True):
            parts.setdefault(name, []).append(1e3 * (after - before))
    medians = {name: statistics.median(values[1:]) for name, values in parts.items()}  # without the first touch
    return medians | {"mebibytes": len(blocks) * runner.block_bytes / 2**20}


def main(settings: Mapping[str, Any]) -> int:
    """Prints medians as JSON. Returns the exit status."""
    if not settings["simulated"]:
        print(json.dumps({"1,000 tokens": _rounded(copies(settings))}), flush=True)
    figures: dict[str, list[dict[str, float]]] = {setup: [] for setup in SETUPS}
    for repeat in range(settings["repeat"]):
        for setup, values in figures.items():
            values.append(asyncio.run(run(setup, settings, repeat)))
    for setup, values in figures.items():
        print(json.dumps({setup: _rounded(_medians(values))}), flush=True)
    return 0


def _medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def _rounded(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 1) for name, value in figures.items()}
