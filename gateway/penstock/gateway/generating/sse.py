"""Token streams as responses. Everything that came with one wake-up leaves in one write."""

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
    """Sends a generation to its end. An error before the first delta, or pulse, is raised with no byte sent.

    Until there is a delta, heartbeats are `early`: comments, so that a protocol's first event remains the first one.
    The deltas that finish the last choice leave together with what `ending` gives.
    """
    batch = await anext(deltas, None)
    await exchange.start_stream(content_type=content_type)
    send = exchange.raw_send
    while batch == []:
        await send(_more(early))
        batch = await anext(deltas, None)
    data = opening() + frames.render(batch or ())
    if frames.live:
        await send(_more(data))
        if isinstance(deltas, Generation) and exchange.body_writer is not None:
            data = await PushedFrames(deltas, frames, exchange.body_writer).sent()
        else:
            data = await _sent(exchange, deltas, frames)
    await exchange.finish(data + ending())


async def _sent(exchange: Exchange, deltas: AsyncIterator[list[ChoiceDelta]], frames: StreamFrames) -> bytes:
    """Sends frames until the last choice ends, and returns those of that end. This coroutine is resumed for every step
    of the engine, and with it all that await it: keep that chain short."""
    send = exchange.raw_send
    async for batch in deltas:
        data = frames.render(batch)
        if not frames.live:
            return data
        if data:
            await send(_more(data))
        elif not batch:
            await send(_more(frames.heartbeat))
    return b""


def _more(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}
