"""The servers that have one model: which is asked, which next, and when two are asked at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.engines.kv_events.index import PromptHashes
from penstock.engines.kv_events.subscriber import FollowedServer
from penstock.engines.replicas.routing import ReplicaLoad, RoutedRequest, Router
from penstock.gateway.configuration.upstream_settings import UpstreamSettings
from penstock.gateway.errors import UpstreamUnavailableError
from penstock.gateway.models.upstream.attempts import OpenAnswer, Question, attempt
from penstock.gateway.models.upstream.failures import AttemptFailed
from penstock.gateway.models.upstream.server import UpstreamServer
from penstock.kvcache import BlockHasher

# How many requests may be tried again: a part of all, so that retries cannot multiply the load of a server in
# trouble.

_MOST = 10.0
"""What may be saved up. It is there at the beginning, too: the first failure of a quiet server may be tried again."""


class RetryBudget:
    """Plain data, without a clock."""

    def __init__(self, ratio: float) -> None:
        """`ratio`: retries for each request; 0: none ever."""
        self._ratio = ratio
        self._left = _MOST if ratio else 0.0

    def note_request(self) -> None:
        """There is a new request."""
        self._left = min(_MOST, self._left + self._ratio)

    def take(self) -> bool:
        """Whether a request may be tried again now; then it counts."""
        if self._left < 1:
            return False
        self._left -= 1
        return True


_FIRST_PAUSE = 0.1
_MOST_PAUSE = 5.0
"""Seconds: who is told to wait longer is told to the client."""
_MARGIN = 0.01
_BLOCK_TOKENS = 64
_KNOWN_BLOCKS = 1 << 14
"""Of what each server has been sent: about a million tokens, which is guessed to be in its prefix cache."""


class Fleet:
    def __init__(
        self, settings: UpstreamSettings, servers: Sequence[UpstreamServer], chance: Callable[[], float] = random.random
    ) -> None:
        self.servers = tuple(servers)
        self.retries = 0
        self.hedges = 0
        self._settings = settings
        self._budget = RetryBudget(settings.retry_ratio)
        self._chance = chance
        self._hasher = BlockHasher()
        self._router = Router(settings.routing, [_KNOWN_BLOCKS] * len(self.servers), _BLOCK_TOKENS, self._hasher)
        self.followed = {
            number: FollowedServer(source, self._hasher, settings.model or settings.name, self.servers[number].label)
            for number, source in enumerate(settings.events_of_urls)
            if source is not None
        }
        """Servers that tell what they have cached."""

    def start(self) -> None:
        """On the event loop, once."""
        for followed in self.followed.values():
            followed.start()

    def stop(self) -> None:
        """Ends what runs beside requests. Idempotent."""
        for followed in self.followed.values():
            followed.stop()
        for server in self.servers:
            server.pool.close()

    @property
    def available(self) -> bool:
        now = asyncio.get_running_loop().time()
        return any(server.takes_requests(now) for server in self.servers)

    async def ask(self, question: Question) -> OpenAnswer:
        """The first answer that begins. Raises PenstockError."""
        self._budget.note_request()
        request = self._routed(question)
        tried: list[UpstreamServer] = []
        pauses = 0
        while True:
            server = self._best(request, tried) or self._best(request)
            if server is None:
                raise self._nobody(question.model)
            tried.append(server)
            try:
                if self._settings.hedge_after:
                    return await self._hedged(server, question, request, tried)
                return await self._attempt(server, question, request)
            except AttemptFailed as failure:
                pause = self._pause(failure, tried, pauses)
                if pause is None or not self._budget.take():
                    raise failure.error from None
            self.retries += 1
            pauses += 1
            await asyncio.sleep(pause)

    def _routed(self, question: Question) -> RoutedRequest:
        salt = "" if question.has_tokens else "text"
        request = self._router.request(question.prefix, salt=salt, session=question.session)
        if not question.has_tokens or not self.followed:
            return request
        prompt = PromptHashes(self._hasher, question.prefix)
        reported = {number: followed.matched(prompt) for number, followed in self.followed.items() if followed.live}
        return replace(request, reported=reported)

    def _best(self, request: RoutedRequest, tried: Sequence[UpstreamServer] = ()) -> UpstreamServer | None:
        """Of those that take requests and were not tried for this one."""
        now = asyncio.get_running_loop().time()
        loads = [
            ReplicaLoad(number, server.in_flight, server.waiting_tokens)
            for number, server in enumerate(self.servers)
            if server not in tried and server.takes_requests(now)
        ]
        return self.servers[self._router.rank(request, loads)[0]] if loads else None

    async def _attempt(self, server: UpstreamServer, question: Question, request: RoutedRequest) -> OpenAnswer:
        """Raises AttemptFailed."""
        number = self.servers.index(server)
        waiting = self._router.to_compute(request, number)
        server.count_cached(request.num_tokens, request.num_tokens - waiting, request.reported.get(number, 0))
        self._router.sent(request, number)
        server.waiting_tokens += waiting
        try:
            return await attempt(server, question)
        finally:
            server.waiting_tokens -= waiting
            self._router.computed(request, number)

    def _pause(self, failure: AttemptFailed, tried: list[UpstreamServer], pauses: int) -> float | None:
        """Seconds before the next try; None: there is none."""
        if not failure.again or pauses >= self._settings.retries:
            return None
        if any(
            server.takes_requests(asyncio.get_running_loop().time()) for server in self.servers if server not in tried
        ):
            return 0.0
        if failure.unhealthy and not self.available:  # it is ejected now
            return None
        own = _FIRST_PAUSE * 2**pauses * (0.5 + self._chance())
        pause = max(own, (failure.retry_after or 0.0) + _MARGIN)
        return pause if pause <= _MOST_PAUSE else None

    def _nobody(self, model: str) -> UpstreamUnavailableError:
        now = asyncio.get_running_loop().time()
        seconds = min(server.health.seconds_until(now) for server in self.servers)
        message = f"No server that has `{model}` takes requests now."
        return UpstreamUnavailableError(message, retry_after=max(1.0, seconds))

    async def _hedged(
        self, server: UpstreamServer, question: Question, request: RoutedRequest, tried: list[UpstreamServer]
    ) -> OpenAnswer:
        """A second server is asked when the first is slow; the first byte wins, and the other one is given up."""
        running = {asyncio.create_task(self._attempt(server, question, request))}
        try:
            await asyncio.wait(running, timeout=self._settings.hedge_after)
            if not any(task.done() for task in running):
                other = self._best(request, tried)
                if other is not None and self._budget.take():
                    self.hedges += 1
                    tried.append(other)
                    running.add(asyncio.create_task(self._attempt(other, question, request)))
            return await _first_good(running)
        finally:
            _give_up(running)


async def _first_good(running: set[asyncio.Task[OpenAnswer]]) -> OpenAnswer:
    """Takes the winner out of `running`. Raises the last failure."""
    while True:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        task = done.pop()
        running.discard(task)
        if task.exception() is None or not running:
            return task.result()


def _give_up(running: set[asyncio.Task[OpenAnswer]]) -> None:
    for task in running:
        task.add_done_callback(_end_unwanted)
        task.cancel()


def _end_unwanted(task: asyncio.Task[OpenAnswer]) -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().end("hedged")
