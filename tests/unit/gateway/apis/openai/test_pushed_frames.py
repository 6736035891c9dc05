"""Frames that are written when the engine's message comes, and a client that is slow to take them."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from penstock.engines.errors import EngineDeadError
from penstock.gateway.apis.openai.frames import Frames
from penstock.gateway.apis.openai.objects import ResponseHead
from penstock.gateway.generating.streams import COMMENT, DeltaDriver
from penstock.gateway.models.language.dataplane import ChoiceDelta, Generation
from penstock.gateway.models.language.generation import DeltaListener


class Source(Generation):
    """In a generation's place."""

    listener: DeltaListener | None = None

    def __init__(self) -> None:
        """It has no engine."""

    def listen(self, listener: DeltaListener | None) -> None:
        self.listener = listener

    def say(self, text: str, finish_reason: str | None = None) -> None:
        assert self.listener is not None, "nobody listens"
        self.listener.take([ChoiceDelta(0, text, [1], finish_reason)])


class Writer:
    written = 0

    def __init__(self) -> None:
        self.texts: list[bytes] = []
        self.room = asyncio.Event()
        self.room.set()

    def write_body(self, data: bytes) -> bool:
        self.texts.append(data)
        return self.room.is_set()

    async def drain(self) -> None:
        await self.room.wait()


class Stream:
    """One that has begun."""

    @classmethod
    async def begin(cls) -> Stream:
        stream = cls()
        stream.source, stream.writer = Source(), Writer()
        head = ResponseHead(id="x", object="text_completion", created=0, model="m", system_fingerprint="f")
        frames = Frames(head, 1, opening=b'"text":')
        pushed = DeltaDriver(cast(Generation, stream.source), frames, stream.writer)
        stream.sending = asyncio.ensure_future(pushed.run())
        await asyncio.sleep(0)
        return stream

    source: Source
    writer: Writer
    sending: asyncio.Future[bytes]


async def test_frames_are_written_at_once_and_the_last_ones_returned() -> None:
    stream = await Stream.begin()
    stream.source.say("a")
    stream.source.say("b")
    assert [text.count(b'"text":') for text in stream.writer.texts] == [1, 1]
    stream.source.say("c", "stop")
    assert b'"stop"' in await stream.sending
    assert len(stream.writer.texts) == 2
    assert stream.source.listener is None


async def test_nothing_is_taken_for_a_slow_client() -> None:
    stream = await Stream.begin()
    stream.writer.room.clear()
    stream.source.say("a")
    assert stream.source.listener is None, "tokens merge in the mailbox"
    stream.writer.room.set()
    while stream.source.listener is None:
        await asyncio.sleep(0)
    stream.source.say("b", "stop")
    assert b'"b"' in await stream.sending


async def test_a_pulse_is_a_comment() -> None:
    stream = await Stream.begin()
    assert stream.source.listener is not None
    stream.source.listener.take([])
    assert stream.writer.texts == [COMMENT]
    stream.sending.cancel()


async def test_what_has_nothing_to_show_is_not_written() -> None:
    stream = await Stream.begin()
    stream.source.say("")
    assert stream.writer.texts == []
    stream.sending.cancel()


async def test_an_error_is_raised_where_the_stream_is_sent() -> None:
    stream = await Stream.begin()
    assert stream.source.listener is not None
    stream.source.listener.fail(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError):
        await stream.sending


async def test_a_cancelled_stream_does_not_listen_any_more() -> None:
    stream = await Stream.begin()
    stream.sending.cancel()
    await asyncio.gather(stream.sending, return_exceptions=True)
    assert stream.source.listener is None
