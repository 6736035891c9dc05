"""The events of a response in the background, for clients that come later, or again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.generating.stream_frames import COMMENT
from penstock.gateway.http.error_form import OpenAIErrors
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.responses.events import error_event

_PARAM = "starting_after"


class EventLog:
    """The last ones, of so many bytes together. Lives on the event loop."""

    def __init__(self, most_bytes: int) -> None:
        self.ended = False
        self.bytes = 0
        self.number = 0
        """Of the next event."""
        self._most_bytes = most_bytes
        self._frames: deque[tuple[int, bytes]] = deque()
        """Events that came together, with the number of the first one."""
        self._changed: asyncio.Future[None] | None = None

    def add(self, frames: bytes, number: int) -> None:
        """`number` is that of the event behind them."""
        if frames:
            self._frames.append((self.number, frames))
            self.bytes += len(frames)
            self.number = number
            while self.bytes > self._most_bytes and len(self._frames) > 1:
                self.bytes -= len(self._frames.popleft()[1])
            self._tell()

    def end(self) -> None:
        self.ended = True
        self._tell()

    def check(self, after: int) -> None:
        """Whether the events behind this number are there, or still to come. Raises InvalidRequestError."""
        if after >= self.number:
            raise InvalidRequestError(f"{_PARAM}: the last event has number {self.number - 1}.", param=_PARAM)
        first = self._frames[0][0]
        if after + 1 < first:
            message = f"{_PARAM}: the events before number {first} are not kept any more."
            raise InvalidRequestError(message, param=_PARAM)

    async def follow(self, after: int, heartbeat: float | None) -> AsyncIterator[bytes]:
        """The events behind this number until the last one, and comments in silence of so many seconds. Raises
        InvalidRequestError when a slow reader has missed some."""
        while True:
            if after + 1 < self.number:
                self.check(after)
                found = self._behind(after)
                after = self.number - 1
                yield found
            elif self.ended:
                return
            elif not await self._change(heartbeat):
                yield COMMENT

    def _behind(self, after: int) -> bytes:
        found: list[bytes] = []
        for first, frames in reversed(self._frames):
            if first > after:
                found.append(frames)
                continue
            events = frames.split(b"\n\n")  # in an event there are no empty lines
            found.append(b"\n\n".join(events[after + 1 - first :]))
            break
        return b"".join(reversed(found))

    async def _change(self, seconds: float | None) -> bool:
        """False: nothing has changed for so long."""
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait((self._changed,), timeout=seconds)
        return bool(done)

    def _tell(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)


async def send_events(exchange: Exchange, log: EventLog, after: int, heartbeat_s: float) -> None:
    """As a stream, until the last one. Raises InvalidRequestError."""
    log.check(after)
    exchange.error_form = _LogErrors(log)
    await exchange.start_stream()
    async for frames in log.follow(after, heartbeat_s or None):
        await exchange.raw_send({"type": "http.response.body", "body": frames, "more_body": True})
    await exchange.finish(b"")


class _LogErrors(OpenAIErrors):
    """Of one reader: the response itself may go on."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def last_events(self, error: Exception, request_id: str) -> bytes:
        return error_event(error, self._log.number)
