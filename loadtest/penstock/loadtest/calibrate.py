"""The costs of this client by itself, measured by the same load test on a server that answers at once."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.fleet import Fleet, RunResult, kill
from penstock.loadtest.metrics import summarize
from penstock.loadtest.mock.options import MockOptions
from penstock.loadtest.options import LoadOptions, Options, Target, WorkloadOptions, is_streamed

_AS_THEY_ARE = frozenset({"openai-chat", "openai-completions", "kserve-generate"})
"""Protocols that the reference server speaks. For others the chat stands in."""
_ALONE = WorkloadOptions(requests=40, prompt_tokens=128, output_tokens=64)
"""The floor: one request at a time."""
_TOGETHER = WorkloadOptions(requests=96, prompt_tokens=128, output_tokens=256)
"""The ceiling, on so many streams:"""
_STREAMS = 32
_SECONDS = 1.0
"""Each of the two ends after this at the latest."""


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    protocol: str
    """With which it was measured."""
    floor_ms: dict[str, float]
    """Medians of `ttft` and `itl`, or of `e2e` where nothing is streamed."""
    tokens_per_s: float
    """Streamed tokens for each CPU-second of a client process, which it cannot exceed; 0 where nothing is streamed."""


async def calibrate(options: Options) -> Calibration:
    """Takes about a second. Raises LoadTestError when this machine does not let a server listen."""
    chosen = options.target
    protocol = chosen.protocol if chosen.protocol in _AS_THEY_ARE else "openai-chat"
    stream = is_streamed(chosen)
    async with _mock() as url, AsyncExitStack() as stack:
        target = Target(url=url, model="mock", protocol=protocol, stream=stream, api_key="none")

        def fleet(workload: WorkloadOptions, concurrency: int) -> Fleet:
            load = LoadOptions(concurrency=concurrency, duration=_SECONDS, grace=_SECONDS)
            return Fleet(Options(target=target, workload=workload, load=load), 1, seed=0)

        alone, together = await asyncio.gather(
            *(stack.enter_async_context(fleet(work, number)) for work, number in ((_ALONE, 1), (_TOGETHER, _STREAMS)))
        )
        floor = summarize((await alone.run()).samples, open_loop=False)
        ceiling = _tokens_per_s(await together.run()) if stream else 0.0
    floors = {"ttft": floor.ttft_ms, "itl": floor.itl_ms} if stream else {"e2e": floor.e2e_ms}
    return Calibration(
        protocol=protocol,
        floor_ms={name: value.p50 for name, value in floors.items() if value is not None},
        tokens_per_s=ceiling,
    )


def _tokens_per_s(result: RunResult) -> float:
    """By CPU time: it does not matter that the server takes its share of the machine meanwhile."""
    cpu = sum(client.cpu_seconds for client in result.clients)
    tokens = sum(sample.tokens for sample in result.samples if not sample.error)
    return round(tokens / cpu) if cpu else 0.0


@asynccontextmanager
async def _mock() -> AsyncIterator[str]:
    """The reference server as a process; yields its address."""
    options = msgspec.json.encode(MockOptions(port=0, ttft_ms=0.0, itl_ms=0.0)).decode()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "penstock.loadtest.mock", options),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        line = await process.stdout.readline() if process.stdout is not None else b""
        if not line.startswith(b"listening on "):
            raise LoadTestError("the built-in server for calibration did not start: --no-calibrate does without")
        yield line.split()[2].rstrip(b",").decode()
    finally:
        kill(process)
        await process.wait()
