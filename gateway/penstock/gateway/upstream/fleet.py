"""The servers that have one model: which is asked, which next, and when two are asked at once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from penstock.gateway.configuration.upstream_settings import UpstreamSettings
from penstock.gateway.errors import UpstreamUnavailableError
from penstock.gateway.upstream.attempts import OpenAnswer, Question, attempt
from penstock.gateway.upstream.failures import AttemptFailed
from penstock.gateway.upstream.retry_budget import RetryBudget
from penstock.gateway.upstream.server import UpstreamServer, least_busy

_FIRST_PAUSE = 0.1
_MOST_PAUSE = 5.0
"""Seconds: who is told to wait longer is told to the client."""
_MARGIN = 0.01


class Fleet:
    def __init__(
        self, settings: UpstreamSettings, servers: Sequence[UpstreamServer], chance: Callable[[], float] = random.random
    ) -> None:
        self.servers = list(servers)
        self.retries = 0
        self.hedges = 0
        self._settings = settings
        self._budget = RetryBudget(settings.retry_ratio)
        self._chance = chance

    @property
    def available(self) -> bool:
        now = asyncio.get_running_loop().time()
        return any(server.takes_requests(now) for server in self.servers)

    async def ask(self, question: Question) -> OpenAnswer:
        """The first answer that begins. Raises PenstockError."""
        self._budget.asked()
        tried: list[UpstreamServer] = []
        for pauses in range(self._settings.retries + 1):
            try:
                return await self._ask_once(question, tried)
            except AttemptFailed as failure:
                pause = self._pause(failure, tried, pauses)
                if pause is None or not self._budget.take():
                    raise failure.error from None
            self.retries += 1
            await asyncio.sleep(pause)
        raise AssertionError("the last failure has been raised")

    def _pause(self, failure: AttemptFailed, tried: list[UpstreamServer], pauses: int) -> float | None:
        """Seconds before the next try; None: there is none."""
        if not failure.again or pauses >= self._settings.retries:
            return None
        if self._choose(tried, only_others=True) is not None:
            return 0.0
        own = _FIRST_PAUSE * 2**pauses * (0.5 + self._chance())
        pause = max(own, (failure.retry_after or 0.0) + _MARGIN)
        return pause if pause <= _MOST_PAUSE else None

    def _choose(self, tried: list[UpstreamServer], *, only_others: bool = False) -> UpstreamServer | None:
        """Of those that were not tried for this request, else of all."""
        now = asyncio.get_running_loop().time()
        # equals take turns
        self.servers.append(self.servers.pop(0))
        server = least_busy((each for each in self.servers if each not in tried), now)
        return server if server is not None or only_others else least_busy(self.servers, now)

    async def _ask_once(self, question: Question, tried: list[UpstreamServer]) -> OpenAnswer:
        server = self._choose(tried)
        if server is None:
            raise AttemptFailed(self._nobody(question.model), "no_server", again=False)
        tried.append(server)
        if not self._settings.hedge_after:
            return await attempt(server, question)
        return await self._hedged(server, question, tried)

    def _nobody(self, model: str) -> UpstreamUnavailableError:
        now = asyncio.get_running_loop().time()
        seconds = min(server.health.seconds_until(now) for server in self.servers)
        message = f"No server that has `{model}` takes requests now."
        return UpstreamUnavailableError(message, retry_after=max(1.0, seconds))

    async def _hedged(self, server: UpstreamServer, question: Question, tried: list[UpstreamServer]) -> OpenAnswer:
        """A second server is asked when the first is slow; the first byte wins, and the other one is given up."""
        running = {asyncio.create_task(attempt(server, question))}
        try:
            await asyncio.wait(running, timeout=self._settings.hedge_after)
            if not any(task.done() for task in running):
                other = self._choose(tried, only_others=True)
                if other is not None and self._budget.take():
                    self.hedges += 1
                    tried.append(other)
                    running.add(asyncio.create_task(attempt(other, question)))
            return await _first_good(running)
        finally:
            await _give_up(running)


async def _first_good(running: set[asyncio.Task[OpenAnswer]]) -> OpenAnswer:
    """Takes the winner out of `running`. Raises the last failure."""
    while True:
        done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        task = done.pop()
        running.discard(task)
        if task.exception() is None or not running:
            return task.result()


async def _give_up(running: set[asyncio.Task[OpenAnswer]]) -> None:
    for task in running:
        task.cancel()
    for ended in await asyncio.gather(*running, return_exceptions=True):
        if isinstance(ended, OpenAnswer):
            ended.end("hedged")
