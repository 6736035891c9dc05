"""Clients that leave at random moments, and whether the server keeps anything of theirs.

`python -m penstock.loadtest.aborts --url http://127.0.0.1:8000 --operator http://127.0.0.1:8002 --model M`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Sequence

import msgspec

from penstock.loadtest.clients.base import ClientOptions
from penstock.loadtest.clients.discover import ask
from penstock.loadtest.clients.openai import CompletionsClient
from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.messages import Call

_MEAN_SECONDS = 0.1
"""Until a client leaves."""
_SETTLE_SECONDS = 30.0


class State(msgspec.Struct):
    """What counts of a model's entry in /debug/scheduler."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    admitted: int
    finished: dict[str, int]

    @property
    def leaked_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks


class Storm:
    """Requests that are cut off after a random time; some end by themselves before that."""

    def __init__(self, url: str, model: str, seed: int) -> None:
        self._rng = random.Random(seed)
        self._clients = {
            (stream, n): CompletionsClient(
                ClientOptions(url=url, model=model, stream=stream, ignore_eos=False, extra={"n": n}), chat=False
            )
            for stream in (False, True)
            for n in (1, 2, 4)
        }
        self.outcomes: Counter[str] = Counter()
        """By `complete`, `left` and the kinds of errors."""

    async def run(self, requests: int, concurrency: int) -> None:
        left = iter(range(requests))

        async def client() -> None:
            for index in left:
                self.outcomes[await self._one(index)] += 1

        await asyncio.gather(*(client() for _ in range(concurrency)))
        for pool in self._clients.values():
            await pool.close()

    async def _one(self, index: int) -> str:
        rng = self._rng
        prompt = [rng.randrange(300, 400) for _ in range(rng.choice((3, 40, 200)))]
        call = Call(index=index, prompt=prompt, output_tokens=rng.randrange(1, 200))
        client = self._clients[rng.random() < 0.7, rng.choice((1, 1, 1, 2, 4))]
        try:
            async with asyncio.timeout(rng.expovariate(1 / _MEAN_SECONDS)):
                answer = await client.send(call)
        except TimeoutError:
            return "left"
        return answer.error or "complete"


async def settle(operator: str, model: str) -> State:
    """The scheduler's state once nothing runs or waits. Raises LoadTestError when that does not come."""
    try:
        async with asyncio.timeout(_SETTLE_SECONDS):
            while True:
                state = await _state(operator, model)
                if state.num_running == state.num_waiting == 0:
                    return state
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise LoadTestError(f"requests still run or wait after {_SETTLE_SECONDS:.0f} s") from None


async def _state(operator: str, model: str) -> State:
    answer = await ask(ClientOptions(url=operator), "/debug/scheduler")
    try:
        return msgspec.json.decode(answer.body, type=dict[str, State])[model]
    except (msgspec.MsgspecError, KeyError):
        raise LoadTestError(f"{operator}/debug/scheduler has no model {model!r} (status {answer.status})") from None


async def _storm_and_settle(args: argparse.Namespace) -> tuple[Counter[str], State]:
    await _state(args.operator, args.model)
    storm = Storm(args.url, args.model, args.seed)
    await storm.run(args.requests, args.concurrency)
    return storm.outcomes, await settle(args.operator, args.model)


def main(argv: Sequence[str] | None = None) -> int:
    """0 where everything that was admitted has ended, no block is missing and no request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--operator", default="http://127.0.0.1:8002")
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        outcomes, state = asyncio.run(_storm_and_settle(args))
    except LoadTestError as error:
        print(f"aborts: {error}", file=sys.stderr)
        return 1
    summary = {"clients": dict(outcomes), "admitted": state.admitted, "finished": state.finished}
    print(json.dumps(summary | {"leaked_blocks": state.leaked_blocks}))
    ended = state.admitted == sum(state.finished.values())
    return 0 if ended and not state.leaked_blocks and outcomes.keys() <= {"complete", "left"} else 1


if __name__ == "__main__":
    sys.exit(main())
