"""Responses that are made after their requests have been answered."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from penstock.engines.errors import OverloadedError, PenstockError
from penstock.gateway.apis.responses.bounds import bounds_of
from penstock.gateway.apis.responses.events import ResponseEvents, error_event
from penstock.gateway.generating.event_log import EventLog
from penstock.gateway.generating.streams import send_frames
from penstock.gateway.models.language.dataplane import Generation
from penstock.gateway.requests.call import Detached, DrainState, ServedCall
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.transports.http.error_form import OpenAIErrors
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.settings import AppSettings

logger = logging.getLogger("penstock")

_LOG_BYTES = 4 << 20
"""Of the events of one response."""
_ENDED_LOGS_BYTES = 64 << 20
"""Of the events of all responses that have ended."""


class BackgroundResponse:
    """One that has not ended."""

    def __init__(
        self,
        context: RequestContext,
        events: ResponseEvents,
        generate: Callable[[], Awaitable[Generation]],
        *,
        size: int,
        stream: bool,
    ) -> None:
        """`context` is its own, not that of the request, which ends before. `size`: bytes that it takes in the store
        until its end."""
        self.context = context
        self.response = events.response
        self.size = size
        self.log = EventLog(_LOG_BYTES, "starting_after") if stream else None
        self._generate = generate
        self._events = events
        self._started = False
        self._log(self._events.queued())

    def shown(self) -> dict[str, Any]:
        return self.response.begun() if self._started else self.response.queued()

    async def run(self, kept: Future[None], drain: DrainState) -> None:
        """`kept`: once this is done, a restart knows of it. Raises what the generation does."""
        with ServedCall(drain, self.context):
            await asyncio.shield(asyncio.wrap_future(kept))
            generation = await self._generate()
            try:
                await self._take(generation)
            finally:
                generation.close()

    async def _take(self, generation: Generation) -> None:
        self.response.usage = generation.usage
        self._started = True
        self._log(self._events.started())
        async for deltas in generation:
            self._log(self._events.render(deltas))

    def end(self, error: BaseException | None) -> None:
        """How `run` has ended."""
        if error is None:
            frames = self._events.ending()
        elif isinstance(error, asyncio.CancelledError):
            frames = self._events.cancelling()
        else:
            if not isinstance(error, PenstockError):
                logger.error("response %s failed", self.response.id, exc_info=error)
            frames = self._events.failing(error if isinstance(error, Exception) else RuntimeError())
        self._log(frames)
        if self.log is not None:
            self.log.end()

    def _log(self, frames: bytes) -> None:
        if self.log is not None:
            self.log.add(frames, self._events.number)


class BackgroundResponses:
    """Lives on the event loop. Responses that have ended are in the store; their events stay here for some time."""

    def __init__(self, settings: AppSettings) -> None:
        self._settings = settings
        self._most = settings.background_responses
        self._most_of_tenant = settings.background_responses_per_tenant or self._most
        self._bounds = bounds_of(settings)
        self._open: dict[str, BackgroundResponse] = {}
        self._work: dict[str, Detached] = {}
        self._ended_logs: OrderedDict[str, tuple[str, EventLog]] = OrderedDict()
        """With their tenants, the oldest first."""
        self._ended_bytes = 0

    @property
    def enabled(self) -> bool:
        return self._most > 0

    def check_room(self, tenant: str, size: int = 0) -> None:
        """For one more, of so many bytes. The store cannot let go of what is still being made: without a bound,
        everything else that it has would go, of other tenants too. Raises OverloadedError."""
        every = [response.size for response in self._open.values()]
        own = [response.size for response in self._open.values() if response.context.tenant == tenant]
        bounds = self._bounds
        many = len(every) >= self._most or len(own) >= self._most_of_tenant
        if many or sum(every) + size > bounds.most_bytes or sum(own) + size > bounds.most_bytes_of_tenant:
            message = "Too many responses are being made in the background: wait for some of them, or cancel one."
            raise OverloadedError(message, retry_after=10)

    def begin(self, response: BackgroundResponse, kept: Future[None]) -> None:
        """There is room. `kept`: the response is in the store."""
        response_id = response.response.id
        self._open[response_id] = response
        work = partial(response.run, kept, self._settings.drain)
        detached = Detached(response.context, self._settings.journal, work, partial(self._ended, response))
        self._work[response_id] = detached
        detached.start()

    def _ended(self, response: BackgroundResponse, error: BaseException | None) -> None:
        response_id = response.response.id
        del self._open[response_id], self._work[response_id]
        response.end(error)
        if response.log is not None:
            self._ended_logs[response_id] = response.context.tenant, response.log
            self._ended_bytes += response.log.bytes
            while self._ended_bytes > _ENDED_LOGS_BYTES:
                self.forget(next(iter(self._ended_logs)))

    def find(self, response_id: str, tenant: str) -> BackgroundResponse | None:
        """None: it has ended, or there is none."""
        response = self._open.get(response_id)
        return response if response is not None and response.context.tenant == tenant else None

    def log(self, response_id: str, tenant: str) -> EventLog | None:
        """The events, also of one that has ended; None where there are none."""
        response = self.find(response_id, tenant)
        if response is not None:
            return response.log
        whose, log = self._ended_logs.get(response_id, ("", None))
        return log if whose == tenant else None

    async def cancel(self, response: BackgroundResponse) -> None:
        """Returns when it has ended."""
        work = self._work[response.response.id]
        work.cancel()
        await work.wait()

    def forget(self, response_id: str) -> None:
        """The events of a response that has ended, if there are any."""
        _, log = self._ended_logs.pop(response_id, ("", None))
        if log is not None:
            self._ended_bytes -= log.bytes

    async def wait(self) -> None:
        """Until all have ended."""
        while self._work:
            await asyncio.gather(*(work.wait() for work in self._work.values()))


async def send_events(exchange: Exchange, log: EventLog, after: int, heartbeat_s: float) -> None:
    """As a stream, until the last one. Raises InvalidRequestError."""
    log.check(after)
    exchange.error_form = _LogErrors(log)
    await send_frames(exchange, log.follow(after, heartbeat_s or None))


class _LogErrors(OpenAIErrors):
    """Of one reader: the response itself may go on."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def last_events(self, error: Exception, request_id: str) -> bytes:
        return error_event(error, self._log.number)
