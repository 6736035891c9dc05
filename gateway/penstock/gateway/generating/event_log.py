"""The events of a stream that is made with or without a reader, for clients that come later, or again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.generating.streams import COMMENT


class EventLog:
    """The last ones, of so many bytes together. Lives on the event loop."""

    def __init__(self, most_bytes: int, param: str) -> None:
        """`param`: what a client names the last event by that it has."""
        self.ended = False
        self.bytes = 0
        self.number = 0
        """Of the next event."""
        self._most_bytes = most_bytes
        self._param = param
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
            raise InvalidRequestError(f"{self._param}: the last event has number {self.number - 1}.", param=self._param)
        first = self._frames[0][0]
        if after + 1 < first:
            message = f"{self._param}: the events before number {first} are not kept any more."
            raise InvalidRequestError(message, param=self._param)

    async def follow(self, after: int, heartbeat: float | None) -> AsyncIterator[bytes]:
        """The events behind this number until the last one, and comments in silence of so many seconds. Raises
        InvalidRequestError when a slow reader has missed some."""
        while True:
            if after + 1 < self.number:
                self.check(after)
                events = self._behind(after)
                after = self.number - 1
                yield events
            elif self.ended:
                return
            elif not await self._change(heartbeat):
                yield COMMENT

    def _behind(self, after: int) -> bytes:
        pieces: list[bytes] = []
        for first, frames in reversed(self._frames):
            if first > after:
                pieces.append(frames)
                continue
            events = frames.split(b"\n\n")  # in an event there are no empty lines
            pieces.append(b"\n\n".join(events[after + 1 - first :]))
            break
        return b"".join(reversed(pieces))

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
