"""A stream from another server's socket to the client's, without resuming a task for each piece."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from penstock.gateway.errors import UpstreamTimeoutError
from penstock.gateway.front.context import RequestContext
from penstock.gateway.front.record import Stage
from penstock.gateway.generating.stream_frames import COMMENT
from penstock.gateway.http.exchange import BodyWriter
from penstock.gateway.upstream.failures import broken_answer
from penstock.gateway.upstream.http_connection import BrokenAnswer, HttpConnection
from penstock.gateway.upstream.stream_reading import StreamReader

_SHORTEST_WAIT = 0.01


class Bounds(NamedTuple):
    """In seconds of silence."""

    idle: float
    """After so much an answer is given up."""
    heartbeat: float
    """After so much the client of a stream gets a comment; 0: never."""


def silent(model: str, seconds: float) -> UpstreamTimeoutError:
    return UpstreamTimeoutError(f"The server behind `{model}` was silent for {seconds:g} seconds.")


def note_first_token(context: RequestContext) -> None:
    """Idempotent."""
    if context.record.first_token_at is None:
        context.record.first_token_at = time.monotonic()
        context.record.enter(Stage.DECODING)


class Relay:
    """Implements Sink. While the client is slow, nothing is taken: the connection stops reading, and the other server
    waits."""

    def __init__(
        self,
        context: RequestContext,
        model: str,
        connection: HttpConnection,
        reader: StreamReader,
        writer: BodyWriter,
        bounds: Bounds,
    ) -> None:
        self._context = context
        self._model = model
        self._connection = connection
        self._reader = reader
        self._writer = writer
        self._bounds = bounds
        self._loop = asyncio.get_running_loop()
        self._shown = self._loop.time()
        """When the client got the newest bytes."""
        self._timer: asyncio.TimerHandle | None = None
        self._pause: asyncio.Future[bytes | None]

    async def sent(self) -> bytes:
        """Sends what comes until the stream is over, and returns the frames of its end. Raises PenstockError."""
        try:
            while True:
                self._pause = self._loop.create_future()
                self._connection.arrived = self._loop.time()  # the time until now was the client's
                self._check_silence()
                self._connection.listen(self)
                last = await self._pause
                if last is not None:
                    return last
                self._cancel_timer()
                await self._writer.drain()
        finally:
            self._cancel_timer()
            self._connection.listen(None)

    def data(self, piece: bytes) -> None:
        frames = self._reader.feed(piece)
        if self._context.record.first_token_at is None and self._reader.has_text:
            note_first_token(self._context)
        if self._reader.done:
            self._stop(frames)
        elif self._reader.error is not None:
            if frames:
                self._writer.write_body(frames)
            self._fail(self._reader.error)
        elif frames:
            self._shown = self._connection.arrived
            if not self._writer.write_body(frames):
                self._stop(None)

    def ended(self, error: BrokenAnswer | None) -> None:
        try:
            if error is not None and not self._reader.complete:
                raise broken_answer(self._model, str(error))
            self._reader.end()
        except Exception as reason:
            self._fail(reason)
        else:
            self._stop(b"")

    def _stop(self, last: bytes | None) -> None:
        self._connection.listen(None)
        if not self._pause.done():
            self._pause.set_result(last)

    def _fail(self, error: Exception) -> None:
        self._connection.listen(None)
        if not self._pause.done():
            self._pause.set_exception(error)

    def _check_silence(self) -> None:
        now, (idle, heartbeat) = self._loop.time(), self._bounds
        silence = now - self._connection.arrived
        if silence >= idle:
            self._fail(silent(self._model, idle))
            return
        wait = idle - silence
        if heartbeat:
            if now - self._shown >= heartbeat:
                self._shown = now
                self._writer.write_body(COMMENT)
            wait = min(wait, self._shown + heartbeat - now)
        self._timer = self._loop.call_later(max(wait, _SHORTEST_WAIT), self._check_silence)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
