"""The answer to one line, which is asked again until there is room for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from penstock.engines.errors import EngineDeadError
from penstock.gateway.anthropic.errors import ANTHROPIC_ERRORS
from penstock.gateway.batches.lines import Line, answered
from penstock.gateway.front.context import Principal
from penstock.gateway.http.error_form import OPENAI_ERRORS, ErrorForm
from penstock.gateway.http.inner_request import InnerAnswer, ask_in_background
from penstock.gateway.http.routes import Handle
from penstock.gateway.http.settings import AppSettings

_BUSY = frozenset({429, 503, 529})
"""With these a line is asked again: the server, or the model, has no room for it now. 529 is Anthropic's."""
_ERROR_FORMS: Mapping[str, ErrorForm] = {"/v1/messages": ANTHROPIC_ERRORS}
"""Where it is not OpenAI's."""
_AGAIN_AFTER_S = 1.0
_ERRORS_FROM = 400
_MOST_DEATHS = 3
"""Of engines, each while it worked on the line: then the line fails, since it may be what kills them."""


async def _nobody_counts() -> None:
    """Where deaths are forgotten at the end of the process."""


class Seat:
    """A line's place among those that are with the models at one time."""

    def __init__(self, seats: asyncio.Semaphore) -> None:
        self._seats = seats
        self._taken = False

    async def take(self) -> None:
        """Idempotent."""
        if not self._taken:
            await self._seats.acquire()
            self._taken = True

    def leave(self) -> None:
        """Idempotent."""
        if self._taken:
            self._taken = False
            self._seats.release()


class LineAsker:
    """Asks lines until they have an answer. When an engine dies, one of the lines that it worked on may be the cause.
    So these are asked one at a time: the next death then harms no other line."""

    def __init__(self, endpoints: Mapping[str, Handle], settings: AppSettings, lines_in_flight: int) -> None:
        self._endpoints = endpoints
        self._settings = settings
        self._seats = asyncio.Semaphore(lines_in_flight)
        self._suspects = asyncio.Lock()

    def seat(self) -> Seat:
        """One that is not taken yet."""
        return Seat(self._seats)

    async def answer(
        self,
        line: Line,
        principal: Principal,
        seat: Seat,
        num_deaths: int = 0,
        died: Callable[[], Awaitable[None]] = _nobody_counts,
    ) -> tuple[bytes, bool]:
        """The line's result, and whether it is an error. While there is no room for the line, it waits without the
        seat, so that lines for other models go on. `num_deaths`: of engines that had it before; `died` is told of each
        one more."""
        while True:
            answer = await self._ask(line, principal, seat, suspected=num_deaths > 0)
            if answer.status not in _BUSY:
                break
            if answer.reason == EngineDeadError.code:
                num_deaths += 1
                await died()
                if num_deaths >= _MOST_DEATHS:
                    break
            seat.leave()
            await asyncio.sleep(_AGAIN_AFTER_S)
        result = answered(line, answer.status, answer.request_id, answer.body, answer.warnings)
        return result, answer.status >= _ERRORS_FROM

    async def _ask(self, line: Line, principal: Principal, seat: Seat, *, suspected: bool) -> InnerAnswer:
        if not suspected:
            return await self._ask_from(seat, line, principal)
        seat.leave()
        async with self._suspects:
            return await self._ask_from(seat, line, principal)

    async def _ask_from(self, seat: Seat, line: Line, principal: Principal) -> InnerAnswer:
        await seat.take()
        form = _ERROR_FORMS.get(line.url, OPENAI_ERRORS)
        return await ask_in_background(self._endpoints[line.url], line.url, line.body, principal, self._settings, form)
