"""How many tokens a server streams per second of its own CPU time.

`python -m penstock.loadtest.streaming --url http://127.0.0.1:8000 --model M --pid GATEWAY_PID --streams 64,256`

Start the server with the simulated engine: at zero latency tokens come faster than they can be sent, so frames
coalesce; with `--sim-step-ms` they come one per frame. Only the process PID counts, not its children: the engine's time
is not in.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from time import perf_counter
from typing import Any

from penstock.loadtest.processes import usage
from penstock.loadtest.sse_client import SSEStream, open_stream


async def run(url: str, model: str, streams: int, tokens: int) -> list[SSEStream]:
    body = {"model": model, "prompt": [[5] * 16], "max_tokens": tokens, "stream": True, "ignore_eos": True}
    opened = await asyncio.gather(*(open_stream(url, "/v1/completions", body) for _ in range(streams)))
    await asyncio.gather(*(stream.done for stream in opened))
    return list(opened)


def measure(url: str, model: str, pid: int, streams: int, tokens: int) -> dict[str, Any]:
    """One run: tokens per CPU-second, per second, and per frame. Raises RuntimeError when a stream broke off."""
    cpu, started = usage([pid])[pid].cpu_seconds, perf_counter()
    opened = asyncio.run(run(url, model, streams, tokens))
    elapsed, cpu = perf_counter() - started, usage([pid])[pid].cpu_seconds - cpu
    broken = sum(b"data: [DONE]" not in stream.body for stream in opened)
    if broken:
        raise RuntimeError(f"{broken} of {streams} streams broke off: {opened[0].body[:300]!r}")
    frames = sum(stream.body.count(b"data: {") for stream in opened)
    reads = sum(len(stream.reads) for stream in opened)
    total = streams * tokens
    return {
        "tokens_per_cpu_s": round(total / cpu),
        "tokens_per_s": round(total / elapsed),
        "tokens_per_frame": round(total / frames, 2),
        "tokens_per_read": round(total / reads, 2),
        "server_cores": round(cpu / elapsed, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True)
    parser.add_argument("--pid", type=int, required=True, help="the gateway's process")
    parser.add_argument("--streams", default="64,256")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens per stream")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()
    for streams in map(int, args.streams.split(",")):
        runs = [measure(args.url, args.model, args.pid, streams, args.tokens) for _ in range(args.repeat)]
        medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        print(json.dumps({"streams": streams, "runs": len(runs), **medians}), flush=True)


if __name__ == "__main__":
    main()
