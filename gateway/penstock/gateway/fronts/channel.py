"""The connection between the supervisor and a front on which they tell each other what has changed: whole messages."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec

_LENGTH = 4
_MOST = 256 << 20
"""Bytes of a message; both ends are ours."""
_In = TypeVar("_In")


class Channel(Generic[_In]):
    """Messages in order, both ways. Sending never waits: what is sent is small, and an end that stops reading is
    ended by the other one."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, incoming: Any) -> None:
        """`incoming`: the types that come in."""
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    async def over(cls, end: socket.socket, incoming: Any) -> Channel[_In]:
        """`end`: of a socket pair."""
        return cls(*await asyncio.open_unix_connection(sock=end), incoming)

    def send(self, message: msgspec.Struct) -> None:
        """What is sent to an end that has gone is lost."""
        if not self._writer.is_closing():
            data = self._encoder.encode(message)
            self._writer.write(len(data).to_bytes(_LENGTH, "big") + data)

    async def messages(self) -> AsyncIterator[_In]:
        """Until the other end has gone. Raises ValueError for what is no message."""
        while True:
            try:
                size = int.from_bytes(await self._reader.readexactly(_LENGTH), "big")
                if size > _MOST:
                    raise ValueError(f"a message of {size} bytes")
                data = await self._reader.readexactly(size)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            yield self._decoder.decode(data)

    def close(self) -> None:
        self._writer.close()

    async def closed(self) -> None:
        """Closes when what has been sent has left."""
        self._writer.close()
        with suppress(OSError):
            await self._writer.wait_closed()
