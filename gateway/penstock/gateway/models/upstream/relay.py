"""Answers of other servers on their way to the client: streams from socket to socket, without resuming a task for each
piece, anything else as a whole."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

import msgspec

from penstock.gateway.errors import UpstreamTimeoutError
from penstock.gateway.generating.streams import COMMENT, FrameDriver
from penstock.gateway.models.upstream.answer_reading import LAST, AnswerReader, StreamReader
from penstock.gateway.models.upstream.attempts import OpenAnswer
from penstock.gateway.models.upstream.failures import broken_answer
from penstock.gateway.models.upstream.request_writing import BYTES_OF_TOKEN
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.requests.record import Stage
from penstock.gateway.transports.http.exchange import Exchange, StreamWriter
from penstock.gateway.transports.http.http_connection import BrokenAnswer, HttpConnection

_SHORTEST_WAIT = 0.01


class SilenceBounds(NamedTuple):
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


class UpstreamRelay(FrameDriver):
    """Implements Sink. While the client is slow, the connection stops reading, and the other server waits."""

    def __init__(
        self,
        context: RequestContext,
        model: str,
        connection: HttpConnection,
        reader: StreamReader,
        writer: StreamWriter,
        bounds: SilenceBounds,
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
            self._wake(frames)
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
            self._wake(b"")

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
                    self._wake(None)
                    return
            wait = min(wait, self._shown + heartbeat - now)
        self._timer = self._loop.call_later(max(wait, _SHORTEST_WAIT), self._check_silence)


async def relay(
    exchange: Exchange, answer: OpenAnswer, answer_reader: AnswerReader, bounds: SilenceBounds, *, shows_usage: bool
) -> None:
    """Sends a stream to its end. An error before its first event is raised with no byte sent. Raises PenstockError."""
    reader = StreamReader(answer_reader, shows_usage=shows_usage)
    frames = reader.feed(answer.first)
    while not frames and reader.error is None and not reader.done:
        piece = await next_piece(answer, answer_reader, bounds)
        if not piece:
            reader.end()
            break
        frames = reader.feed(piece)
    if reader.error is not None and not frames:
        raise reader.error
    context = exchange.context
    await exchange.start_stream()
    if frames:
        await exchange.raw_send({"type": "http.response.body", "body": frames, "more_body": True})
    if reader.has_text:
        note_first_token(context)
    last = b"" if reader.done else await _rest(exchange, answer, answer_reader, reader, bounds)
    context.record.finish_reasons = reader.finish_reasons
    answer.end("200")
    await exchange.finish(last + LAST)


async def _rest(
    exchange: Exchange, answer: OpenAnswer, answer_reader: AnswerReader, reader: StreamReader, bounds: SilenceBounds
) -> bytes:
    """Sends all but the last frames, and returns those. Raises PenstockError."""
    if reader.error is not None:
        raise reader.error
    return await UpstreamRelay(
        exchange.context, answer_reader.model, answer.connection, reader, exchange.writer, bounds
    ).run()


async def pass_on(
    exchange: Exchange, answer: OpenAnswer, reader: AnswerReader, bounds: SilenceBounds, *, has_choices: bool
) -> None:
    """`has_choices`: else it has rows of data. Raises PenstockError, with no byte sent."""
    body = bytearray()  # pieces may be of very few bytes
    while piece := await next_piece(answer, reader, bounds):
        reader.hold(len(body) + len(piece))
        body += piece
    fields = reader.fields(body)
    expected = "choices" if has_choices else "data"
    if expected not in fields:
        raise broken_answer(reader.model, f"it has no {expected}")
    if "usage" in fields:
        reader.read_usage(fields["usage"])
    if not reader.has_usage and has_choices:
        reader.usage.completion_tokens = len(body) // BYTES_OF_TOKEN
    if has_choices:
        ends = [choice.finish_reason for choice in reader.choices(fields["choices"])]
        exchange.context.record.finish_reasons = tuple(reason for reason in ends if reason is not None)
    answer.end("200")
    await exchange.respond(200, msgspec.json.encode(fields))


async def next_piece(answer: OpenAnswer, reader: AnswerReader, bounds: SilenceBounds) -> bytes:
    """Empty at the end. Raises UpstreamError."""
    try:
        async with asyncio.timeout(bounds.idle):
            return await answer.connection.chunk()
    except TimeoutError:
        raise silent(reader.model, bounds.idle) from None
    except BrokenAnswer as reason:
        raise broken_answer(reader.model, str(reason)) from None
