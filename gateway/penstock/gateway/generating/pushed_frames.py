"""Frames that go from the engine's message to the socket without resuming a task for each token."""

from __future__ import annotations

import asyncio

from penstock.gateway.generating.stream_frames import StreamFrames
from penstock.gateway.http.exchange import BodyWriter
from penstock.gateway.llm.dataplane import ChoiceDelta, Generation


class PushedFrames:
    """Of one stream whose response has begun. While the client is slow, nothing is taken out of the request's mailbox:
    tokens merge there."""

    def __init__(self, generation: Generation, frames: StreamFrames, writer: BodyWriter) -> None:
        self._generation = generation
        self._frames = frames
        self._writer = writer
        self._stopped: asyncio.Future[bytes | None]

    async def send_all_but_last(self) -> bytes:
        """Sends frames until the last choice ends. Returns the frames of that end: they leave together with the end of
        the response. Raises what the generation does."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                self._stopped = loop.create_future()
                self._generation.listen(self)
                last = await self._stopped
                if last is not None:
                    return last
                await self._writer.drain()
        finally:
            self._generation.listen(None)

    def take(self, deltas: list[ChoiceDelta]) -> None:
        data = self._frames.render(deltas)
        if not self._frames.live:
            self._stop(data)
        elif (data or not deltas) and not self._writer.write_body(data or self._frames.heartbeat):
            self._stop(None)

    def _stop(self, last: bytes | None) -> None:
        self._generation.listen(None)
        if not self._stopped.done():
            self._stopped.set_result(last)

    def fail(self, error: Exception) -> None:
        if not self._stopped.done():
            self._stopped.set_exception(error)
