"""How much of their prompts servers have cached, by what this server knows of them: a simulation of four servers with
the engine's own KV cache, 200 conversations, and one or two of us in front.

`python tests/unit/gateway/models/upstream/test_cache_share.py` prints the table of docs/upstream.md.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import deque
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from penstock.engines.kv_events.index import read_batch
from penstock.engines.kv_events.messages import encoded, events_of
from penstock.engines.replicas.state import RoutingPolicy
from penstock.gateway.configuration.upstream_settings import UpstreamSettings
from penstock.gateway.models.upstream.attempts import OpenAnswer, Question
from penstock.gateway.models.upstream.failures import Redactor
from penstock.gateway.models.upstream.fleet import Fleet
from penstock.gateway.models.upstream.server import UpstreamServer
from penstock.kvcache import KVCacheManager, KVGroup

SERVERS, BLOCK = 4, 16
BLOCKS, AT_A_TIME, IN_FLIGHT = 30, 0.4, 0.12
"""For each conversation: in each server's cache, not at their end, with a request under way."""
TURNS = 6
SYSTEM_PROMPTS, SYSTEM, QUESTION, ANSWER = 10, 1000, 150, 250
"""Kinds, and tokens of each."""
_MOST_TEXT = 16 << 10
"""As `UpstreamRequest.prefix`, in numbers of four bytes."""


class SimulatedServer:
    """Its KV cache, and what it says about that."""

    def __init__(self, num_blocks: int) -> None:
        self._kv = KVCacheManager(num_blocks, [KVGroup(BLOCK)])
        self._log = self._kv.keep_log()
        self.indexes: list[Any] = []

    def serve(self, prompt: list[int], answer: list[int]) -> int:
        """Returns how many tokens of the prompt were cached."""
        chains = self._kv.chains()
        admitted = self._kv.admit(prompt, chains, len(prompt))
        assert admitted is not None
        tables, cached = admitted
        tokens = prompt + answer
        if len(tokens) > tables.capacity:
            self._kv.grow(tables, len(prompt), len(tokens))
        self._kv.copied(tables)
        self._kv.publish(tables, tokens, len(tokens))
        self._kv.free(tables)
        events = read_batch(encoded(events_of(self._log.take(), self._kv.groups), 0.0)).events
        for index in self.indexes:
            index.apply(events)
        return cached


class _Nothing:
    """A connection that is closed already."""

    complete, closed, reusable = False, True, False

    def listen(self, sink: object) -> None: ...

    def close(self) -> None: ...


def fleet(way: str, servers: list[SimulatedServer]) -> Fleet:
    urls = tuple(f"http://{number}" for number in range(SERVERS))
    settings = UpstreamSettings(name="m", url=urls, routing=RoutingPolicy.PREFIX)
    if way == "events":
        events = tuple(f"tcp://{number}:1" for number in range(SERVERS))
        settings = UpstreamSettings(name="m", url=urls, kv_events=events, tokenizer="a folder")
    elif way != "text":
        settings = UpstreamSettings(name="m", url=urls, routing=RoutingPolicy(way))
    gateway = Fleet(settings, [UpstreamServer(settings, url, None) for url in urls])
    for number, followed in gateway.followed.items():
        [rank] = followed.ranks
        rank.live = True
        servers[number].indexes.append(rank.index)
    return gateway


async def cached_share(way: str, gateways: int, conversations: int) -> float:
    servers = [SimulatedServer(BLOCKS * conversations) for _ in range(SERVERS)]
    fleets = [fleet(way, servers) for _ in range(gateways)]
    chance = random.Random(7)
    waiting = [system_prompt(number % SYSTEM_PROMPTS) for number in range(conversations)]
    active: list[list[int]] = []
    answers: deque[OpenAnswer] = deque()
    counts = {"cached": 0, "all": 0}
    answer: list[int] = []

    async def attempt(server: UpstreamServer, question: Question) -> OpenAnswer:
        server.in_flight += 1
        counts["cached"] += servers[int(server.url.host)].serve(prompt, answer)
        counts["all"] += len(prompt)
        return OpenAnswer(server, _Nothing(), b"")  # type: ignore[arg-type]

    with patch("penstock.gateway.models.upstream.fleet.attempt", attempt):
        while waiting or active:
            while waiting and len(active) < AT_A_TIME * conversations:
                active.append(waiting.pop())
            prompt = active.pop(chance.randrange(len(active)))
            prompt += words(chance, QUESTION)
            answer = words(chance, ANSWER)
            answers.append(await chance.choice(fleets).ask(question(prompt, has_tokens=way == "events")))
            prompt = prompt + answer
            if len(prompt) < SYSTEM + TURNS * (QUESTION + ANSWER):
                active.append(prompt)
            if len(answers) > IN_FLIGHT * conversations:
                answers.popleft().end("200")
    return counts["cached"] / counts["all"]


def system_prompt(kind: int) -> list[int]:
    return words(random.Random(kind), SYSTEM)


def words(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(50_000) for _ in range(count)]


def question(prompt: list[int], *, has_tokens: bool) -> Question:
    known = Question("m", "chat/completions", [], b"", True, 1.0, Redactor(()))
    return replace(known, prefix=prompt if has_tokens else prompt[:_MOST_TEXT], has_tokens=has_tokens)


async def test_what_servers_say_is_worth_more_than_what_one_of_two_gateways_has_sent_them() -> None:
    events, text, in_turn = [await cached_share(way, 2, 30) for way in ("events", "text", "round-robin")]
    assert events > text + 0.05
    assert text > in_turn + 0.05


async def _table() -> None:
    for way in ("events", "text", "least-loaded", "round-robin"):
        shares = [await cached_share(way, gateways, 200) for gateways in (1, 2)]
        sys.stdout.write(f"{way}: {shares[0]:.1%} {shares[1]:.1%}\n")


if __name__ == "__main__":
    asyncio.run(_table())
