"""Token streams as responses. Everything that arrives with one wake-up leaves in one write."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from starlette.types import Message

from penstock.gateway.generating.pushed_frames import PushedFrames
from penstock.gateway.generating.stream_frames import COMMENT, StreamFrames
from penstock.gateway.http.exchange import EVENT_STREAM, Exchange
from penstock.gateway.llm.dataplane import ChoiceDelta, Generation


async def stream(
    exchange: Exchange,
    deltas: AsyncIterator[list[ChoiceDelta]],
    frames: StreamFrames,
    *,
    opening: Callable[[], bytes] = bytes,
    ending: Callable[[], bytes],
    content_type: bytes = EVENT_STREAM,
    early: bytes = COMMENT,
) -> None:
    """Sends a generation to its end. An error before the first delta, or pulse, is raised before any byte is sent.

    `opening` and `ending` give what is written before the first frame and after the last one; the frames that end the
    last choice leave together with `ending`. Until there is a delta, heartbeats are `early`, which is a comment by
    default: a protocol's first event has to remain the first.
    """
    batch = await anext(deltas, None)
    await exchange.start_stream(content_type=content_type)
    send = exchange.raw_send
    while batch == []:
        await send(_body_message(early))
        batch = await anext(deltas, None)
    data = opening() + frames.render(batch or ())
    if frames.live:
        await send(_body_message(data))
        if isinstance(deltas, Generation) and exchange.body_writer is not None:
            data = await PushedFrames(deltas, frames, exchange.body_writer).send_all_but_last()
        else:
            data = await _send_all_but_last(exchange, deltas, frames)
    await exchange.finish(data + ending())


async def _send_all_but_last(
    exchange: Exchange, deltas: AsyncIterator[list[ChoiceDelta]], frames: StreamFrames
) -> bytes:
    """Sends frames until the last choice ends, and returns the frames of that end. Every step of the engine resumes
    this coroutine and all that await it: keep that chain short."""
    send = exchange.raw_send
    async for batch in deltas:
        data = frames.render(batch)
        if not frames.live:
            return data
        if data:
            await send(_body_message(data))
        elif not batch:
            await send(_body_message(frames.heartbeat))
    return b""


def _body_message(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}
