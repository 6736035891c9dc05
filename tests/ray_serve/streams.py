"""Streams of chats, and how each of them ended."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Ended:
    status: int = 0
    replica: str = ""
    text: str = ""
    finish_reason: str | None = None
    error: dict[str, Any] | None = None
    done: bool = False
    """The last event came: the stream was not cut."""
    usage: dict[str, Any] = field(default_factory=dict)


async def chat(client: httpx.AsyncClient, content: str, max_tokens: int = 64, **fields: Any) -> Ended:
    """One stream to its end, whatever that is."""
    ended = Ended()
    body = {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": max_tokens,
        "messages": [{"role": "user", "content": content}],
        **fields,
    }
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            ended.status = answer.status_code
            ended.replica = answer.headers.get("x-penstock-replica", "")
            async for line in answer.aiter_lines():
                _take(ended, line)
    except httpx.HTTPError as error:
        ended.error = {"message": f"cut: {error!r}"}
    return ended


def _take(ended: Ended, line: str) -> None:
    if ended.status != 200:
        ended.error = json.loads(line)["error"] if line else ended.error
        ended.done = True
    if not line.startswith("data: "):
        return
    data = line.removeprefix("data: ")
    if data == "[DONE]":
        ended.done = True
        return
    event = json.loads(data)
    ended.error = event.get("error", ended.error)
    ended.usage = event.get("usage") or ended.usage
    for choice in event.get("choices", ()):
        ended.text += choice["delta"].get("content") or ""
        ended.finish_reason = choice["finish_reason"] or ended.finish_reason


class SteadyLoad:
    """So many chats at any time, until `stop`."""

    def __init__(self, url: str, concurrency: int, max_tokens: int = 64) -> None:
        self.ended: list[Ended] = []
        self._client = httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None))
        self._stopping = False
        self._tasks = [asyncio.create_task(self._ask(number, max_tokens)) for number in range(concurrency)]

    async def _ask(self, number: int, max_tokens: int) -> None:
        turn = 0
        while not self._stopping:
            turn += 1
            self.ended.append(await chat(self._client, f"caller {number}, turn {turn}", max_tokens))

    async def wait_for(self, number: int) -> None:
        """More chats have ended since now."""
        target = len(self.ended) + number
        while len(self.ended) < target:
            await asyncio.sleep(0.1)

    async def stop(self) -> list[Ended]:
        """When those that run have ended."""
        self._stopping = True
        await asyncio.gather(*self._tasks)
        await self._client.aclose()
        return self.ended


def outcomes(ended: list[Ended]) -> Counter[str]:
    """finished, error (an event or a status says it), or cut (nothing does)."""
    return Counter(_outcome(each) for each in ended)


def _outcome(ended: Ended) -> str:
    if not ended.done:
        return "cut"
    return "error" if ended.error is not None else "finished"
