"""A stream from another server's socket to the client's, without resuming a task for each piece."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from penstock.gateway.errors import UpstreamTimeoutError
from penstock.gateway.front.context import RequestContext
from penstock.gateway.front.record import Stage
from penstock.gateway.generating.streams import COMMENT, StreamDriver
from penstock.gateway.http.exchange import StreamWriter
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


class Relay(StreamDriver):
    """Implements Sink. While the client is slow, the connection stops reading, and the other server waits."""

    def __init__(
        self,
        context: RequestContext,
        model: str,
        connection: HttpConnection,
        reader: StreamReader,
        writer: StreamWriter,
        bounds: Bounds,
    ) -> None:
        super().__init__(writer)
        self._context = context
        self._model = model
        self._connection = connection
        self._reader = reader
        self._bounds = bounds
        self._loop = asyncio.get_running_loop()
        self._shown = self._loop.time()
        """When the client got the newest bytes."""
        self._timer: asyncio.TimerHandle | None = None

    def _listen(self) -> None:
        self._connection.arrived = self._loop.time()  # the time until now was the client's
        self._check_silence()
        if not self._turn.done():
            self._connection.listen(self)

    def _leave(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._connection.listen(None)

    def data(self, piece: bytes) -> None:
        frames = self._reader.feed(piece)
        if self._context.record.first_token_at is None and self._reader.has_text:
            note_first_token(self._context)
        if self._reader.done:
            self._stop(frames)
        elif self._reader.error is not None:
            self.fail(self._reader.error, frames)
        elif frames:
            self._shown = self._connection.arrived
            self._write(frames)

    def ended(self, error: BrokenAnswer | None) -> None:
        try:
            if error is not None and not self._reader.complete:
                raise broken_answer(self._model, str(error))
            self._reader.end()
        except Exception as reason:
            self.fail(reason)
        else:
            self._stop(b"")

    def _check_silence(self) -> None:
        now, (idle, heartbeat) = self._loop.time(), self._bounds
        silence = now - self._connection.arrived
        if silence >= idle:
            self.fail(silent(self._model, idle))
            return
        wait = idle - silence
        if heartbeat:
            if now - self._shown >= heartbeat:
                self._shown = now
                if not self._writer.write_body(COMMENT):
                    self._stop(None)
                    return
            wait = min(wait, self._shown + heartbeat - now)
        self._timer = self._loop.call_later(max(wait, _SHORTEST_WAIT), self._check_silence)
