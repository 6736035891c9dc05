"""Token streams as responses, and whole generations. Everything that arrives with one wake-up leaves in one write."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from starlette.types import Message

from penstock.gateway.models.language.dataplane import ChoiceDelta, Generation, TokenLogprob
from penstock.gateway.transports.http.exchange import EVENT_STREAM, Exchange, StreamWriter
from penstock.gateway.transports.stream_driver import StreamDriver
from penstock.tokenizers import Part

COMMENT = b": keep-alive\n\n"
"""Clients pass over it."""


class StreamFrames(Protocol):
    """Renders the deltas of one call as server-sent events."""

    live: int
    """Choices whose end has not been rendered."""
    heartbeat: bytes
    """Sent when there is nothing else for some time."""

    def render(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """Empty when none of them has anything to show."""
        ...


class FrameDriver(StreamDriver[bytes | None]):
    """Writes frames to an HTTP response. Its task gets None when the client is slow, and the last frames."""

    def __init__(self, writer: StreamWriter) -> None:
        self._writer = writer
        self._failure: Exception | None = None
        self.waited = 0.0
        """Seconds for the client."""

    async def run(self) -> bytes:
        """Writes until the source ends. Returns the frames of that end: they leave together with the end of the
        response. Raises what the source does."""
        async for last in self:
            if last is not None:
                return last
            slow_since = time.monotonic()
            await self._writer.drain()
            self.waited += time.monotonic() - slow_since
            if self._failure is not None:
                raise self._failure
        return b""

    def _write(self, frames: bytes) -> None:
        if not self._writer.write_body(frames):
            self._wake(None)

    def fail(self, error: Exception, frames: bytes = b"") -> None:
        """The end of the source: the error is raised when these frames are written."""
        if frames:
            self._writer.write_body(frames)
            self._failure = error
            self._wake(None)
        else:
            self._raise(error)


class DeltaDriver(FrameDriver):
    """Of a generation's deltas, as an API's frames, until its last choice ends."""

    def __init__(
        self, deltas: AsyncIterator[list[ChoiceDelta]], frames: StreamFrames, writer: StreamWriter, *, push: bool = True
    ) -> None:
        """`push`: False for a writer that needs a task for each piece anyway."""
        super().__init__(writer)
        self._deltas = deltas
        self._pushed = deltas if push and isinstance(deltas, Generation) else None
        self._frames = frames

    def _listen(self) -> None:
        if self._pushed is not None:
            self._pushed.listen(self)

    def _leave(self) -> None:
        if self._pushed is not None:
            self._pushed.listen(None)

    async def _pull(self) -> None:
        """Of deltas that are made of a generation's or of another server's answer, too."""
        if self._pushed is not None:
            await super()._pull()
        else:
            self.take(await anext(self._deltas))

    def take(self, deltas: list[ChoiceDelta]) -> None:
        data = self._frames.render(deltas)
        if not self._frames.live:
            self._wake(data)
        elif data or not deltas:
            self._write(data or self._frames.heartbeat)


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
        driver = DeltaDriver(deltas, frames, exchange.writer, push=exchange.body_writer is not None)
        data = await driver.run()
        exchange.context.record.write_seconds = driver.waited
    await exchange.finish(data + ending())


async def send_frames(exchange: Exchange, frames: AsyncIterator[bytes]) -> None:
    """Sends these as a stream, to its end."""
    await exchange.start_stream()
    async for frame in frames:
        await exchange.raw_send(_body_message(frame))
    await exchange.finish(b"")


def _body_message(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}


@dataclass(slots=True)
class Collected:
    """All deltas of one choice, joined."""

    texts: list[str] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, delta: ChoiceDelta) -> None:
        self.texts.append(delta.text)
        self.parts += delta.parts or ()
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or ()
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason


async def collect(deltas: AsyncIterator[list[ChoiceDelta]], choices: int) -> list[Collected]:
    """Raises the error that ended a choice, if one did."""
    collected = [Collected() for _ in range(choices)]
    async for batch in deltas:
        _add(batch, collected)
    return collected


async def collecting(
    deltas: AsyncIterator[list[ChoiceDelta]], collected: Sequence[Collected]
) -> AsyncIterator[list[ChoiceDelta]]:
    """The same deltas again, which join what there is of their choices."""
    async for batch in deltas:
        _add(batch, collected)
        yield batch


def _add(deltas: Sequence[ChoiceDelta], collected: Sequence[Collected]) -> None:
    for delta in deltas:
        collected[delta.index].add(delta)
