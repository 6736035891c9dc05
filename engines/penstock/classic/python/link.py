"""The server's end of a model process's socket."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any, cast

from penstock.classic.python.arena_files import ArenaFiles
from penstock.classic.python.worker.arena import ReceiveArena, SendArena
from penstock.classic.python.worker.wire import FRAME, Packer, decode, frame

OnMessage = Callable[[str, list[Any], memoryview], None]


def _ignore(kind: str, fields: list[Any], tail: memoryview) -> None:
    """For what comes after the end."""


class Link(asyncio.Protocol):
    """Messages both ways. `on_message` gets the kind, the fields and the tail of each as it comes; the arrays over a
    tail are read-only."""

    def __init__(self, files: ArenaFiles, initial: int, growth: int, on_message: OnMessage) -> None:
        self.inbox = ReceiveArena(files.up)
        self.outbox = SendArena(files.down, initial, growth)
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._files = files
        self._on_message = on_message
        self._rest = bytearray()
        self._needed = FRAME.size
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def connect(
        cls, sock: socket.socket, files: ArenaFiles, sizes: tuple[int, int], on_message: OnMessage
    ) -> Link:
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: cls(files, *sizes, on_message), sock=sock)
        return link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return
            data = bytes(self._rest)
            self._rest.clear()
        view = memoryview(data)
        position, end = 0, len(data)
        self._needed = FRAME.size
        while end - position >= FRAME.size:
            head, tail = FRAME.unpack_from(data, position)
            if position + FRAME.size + head + tail > end:
                self._needed = FRAME.size + head + tail
                break
            start = position + FRAME.size
            position = start + head + tail
            kind, returned, grown, *fields = decode(view[start : start + head])
            if returned:
                self.outbox.release(returned)
            if grown:
                self.inbox.grown(grown)
            self._on_message(kind, fields, view[start + head : position])
        self._rest += view[position:]

    def connection_lost(self, error: Exception | None) -> None:
        self._files.close()  # what is mapped stays mapped
        self._transport = None
        self._on_message = _ignore
        if not self.closed.done():
            self.closed.set_result(None)

    def send(self, kind: str, fields: list[Any], packer: Packer | None = None) -> None:
        """Nothing happens when the process has gone."""
        if self._transport is not None:
            message = [kind, self.inbox.returned(), self.outbox.announcement(), *fields]
            self._transport.write(frame(message, packer))

    def close(self) -> None:
        if self._transport is not None:
            with contextlib.suppress(OSError):
                self._transport.abort()
