"""Clients that leave at random moments, and whether the server keeps anything of theirs.

`python -m penstock.loadtest.aborts --url http://127.0.0.1:8000 --operator http://127.0.0.1:8002 --model M`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import urllib.request
from typing import Any

from penstock.loadtest.sse_client import open_stream


async def one(url: str, model: str, rng: random.Random) -> None:
    """A request that is cut off after a random time; some end by themselves before that."""
    body = {
        "model": model,
        "prompt": [[rng.randrange(300, 400) for _ in range(rng.choice((3, 40, 200)))]],
        "max_tokens": rng.randrange(1, 200),
        "n": rng.choice((1, 1, 1, 2, 4)),
        "stream": rng.random() < 0.7,
    }
    stream = await open_stream(url, "/v1/completions", body)
    try:
        async with asyncio.timeout(rng.expovariate(1 / 0.1)):
            await asyncio.shield(stream.done)
    except TimeoutError:
        stream.abort()


async def storm(url: str, model: str, requests: int, concurrency: int, seed: int) -> None:
    rng = random.Random(seed)
    left = iter(range(requests))

    async def worker() -> None:
        for _ in left:
            await one(url, model, rng)

    await asyncio.gather(*(worker() for _ in range(concurrency)))


def state(operator: str, model: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{operator}/debug/scheduler") as answer:
        return dict(json.load(answer)[model])


async def settle(operator: str, model: str, seconds: float = 30) -> dict[str, Any]:
    """The scheduler's state once nothing runs or waits."""
    async with asyncio.timeout(seconds):
        while True:
            found = await asyncio.to_thread(state, operator, model)
            if found["num_running"] == found["num_waiting"] == 0:
                return found
            await asyncio.sleep(0.1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--operator", default="http://127.0.0.1:8002")
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    asyncio.run(storm(args.url, args.model, args.requests, args.concurrency, args.seed))
    found = asyncio.run(settle(args.operator, args.model))
    ended = sum(found["finished"].values())
    leaked = found["num_blocks"] - found["num_free_blocks"]
    print(json.dumps({"admitted": found["admitted"], "finished": found["finished"], "leaked_blocks": leaked}))
    return 0 if found["admitted"] == ended and not leaked else 1


if __name__ == "__main__":
    sys.exit(main())
