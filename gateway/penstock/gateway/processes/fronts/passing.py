"""Requests that a front passes on to the supervisor, and their answers: one request at a time on a connection of a
Unix socket, as frames. What is said here a client cannot say: the socket is in a folder of this user alone.

HTTP:  front: PassedRequest, body frames, END.           supervisor: AnswerStart, body frames, END.
gRPC:  front: PassedCall, a frame for each message, END. supervisor: a frame for each message, CallEnd.

A side that cannot go on closes the connection; so does a front whose client has left.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, TypeAlias

import msgspec

MESSAGE, BODY, END = 0, 1, 2
"""Kinds of frames: one of the structs below; a piece of a body, or a message of gRPC; the end of these."""
_HEAD = 5
_PIECE = 256 << 10
"""Longer bodies travel in pieces, so that neither side holds more of them than that."""
_BUFFER = 256 << 10
_LINGER_SECONDS = 5.0

Frame: TypeAlias = tuple[int, bytes]


class PassedRequest(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An HTTP request, in ASGI's words."""

    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: list[tuple[bytes, bytes]]
    http_version: str
    scheme: str
    client: tuple[str, int] | None
    server: tuple[str, int | None] | None
    arrival: float
    """Of time.monotonic(), which all processes of a machine share."""


class PassedCall(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An RPC."""

    path: str
    metadata: list[tuple[str, Any]]
    """Values are str, or bytes where the name ends in -bin."""
    seconds: float | None
    """That are left of its time."""


class AnswerStart(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The start of an HTTP answer."""

    status: int
    headers: list[tuple[bytes, bytes]]


class CallEnd(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The end of an RPC."""

    code: int
    details: str
    metadata: list[tuple[str, Any]]


_decode = msgspec.msgpack.Decoder(PassedRequest | PassedCall | AnswerStart | CallEnd).decode
_encode = msgspec.msgpack.Encoder().encode


class Passage:
    """A connection. Not for several tasks that read, or several that write, at one time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def to(cls, path: str) -> Passage:
        """Raises OSError."""
        return cls(*await asyncio.open_unix_connection(path, limit=_BUFFER))

    def say(self, message: PassedRequest | PassedCall | AnswerStart | CallEnd) -> None:
        self._write(MESSAGE, _encode(message))

    async def send(self, data: bytes) -> None:
        """A piece of a body. Returns when little waits for the other side. Raises ConnectionError."""
        view = memoryview(data)
        for start in range(0, len(data), _PIECE):
            await self.send_message(view[start : start + _PIECE])

    async def send_message(self, data: bytes | memoryview) -> None:
        """The same, as one frame."""
        self._write(BODY, data)
        await self._writer.drain()

    def end(self) -> None:
        """Of a body."""
        self._write(END, b"")

    async def flush(self) -> None:
        await self._writer.drain()

    def _write(self, kind: int, data: bytes | memoryview) -> None:
        self._writer.writelines((len(data).to_bytes(4, "big") + bytes((kind,)), data))

    async def receive(self) -> tuple[int, Any]:
        """The next frame; of kind MESSAGE: the message. Raises ConnectionError where there is none."""
        try:
            head = await self._reader.readexactly(_HEAD)
            data = await self._reader.readexactly(int.from_bytes(head[:4], "big"))
        except asyncio.IncompleteReadError:
            raise ConnectionResetError("the other side has closed the connection") from None
        return head[4], _decode(data) if head[4] == MESSAGE else data

    async def until_closed(self) -> None:
        """Reads on, for a short while, until the other side has its answer and closes: who closes before, with bytes
        unread, takes the answer away. Raises ConnectionError."""
        await asyncio.sleep(0)  # a task that was cancelled just now may still wait for the same bytes
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_SECONDS):
                while await self._reader.read(_BUFFER):
                    pass

    def close(self) -> None:
        self._writer.close()
