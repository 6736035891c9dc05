"""From an answer of another server to the client's: a stream event by event, anything else as a whole."""

from __future__ import annotations

import asyncio

import msgspec

from penstock.gateway.http.exchange import Exchange
from penstock.gateway.upstream.answer_reading import AnswerReader
from penstock.gateway.upstream.attempts import OpenAnswer
from penstock.gateway.upstream.failures import broken_answer
from penstock.gateway.upstream.http_connection import BrokenAnswer
from penstock.gateway.upstream.relay import Bounds, Relay, note_first_token, silent
from penstock.gateway.upstream.request_body import BYTES_OF_TOKEN
from penstock.gateway.upstream.stream_reading import LAST, StreamReader


async def relay(
    exchange: Exchange, answer: OpenAnswer, answer_reader: AnswerReader, bounds: Bounds, *, shows_usage: bool
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
    exchange: Exchange, answer: OpenAnswer, answer_reader: AnswerReader, reader: StreamReader, bounds: Bounds
) -> bytes:
    """Sends all but the last frames, and returns those. Raises PenstockError."""
    if reader.error is not None:
        raise reader.error
    return await Relay(exchange.context, answer_reader.model, answer.connection, reader, exchange.writer, bounds).run()


async def pass_on(
    exchange: Exchange, answer: OpenAnswer, reader: AnswerReader, bounds: Bounds, *, has_choices: bool
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


async def next_piece(answer: OpenAnswer, reader: AnswerReader, bounds: Bounds) -> bytes:
    """Empty at the end. Raises UpstreamError."""
    try:
        async with asyncio.timeout(bounds.idle):
            return await answer.connection.chunk()
    except TimeoutError:
        raise silent(reader.model, bounds.idle) from None
    except BrokenAnswer as reason:
        raise broken_answer(reader.model, str(reason)) from None
