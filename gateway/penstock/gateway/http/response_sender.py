"""What stands between uvicorn and the transport of one response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from uvicorn.protocols.http.flow_control import FlowControl

MAX_UNSENT_BYTES = 1 << 16
"""Of one connection, before its stream is made to wait. A TLS transport would take eight times that in."""
_JOINED_BYTES = 1 << 16
"""Longer bodies are not copied behind their heads."""


class ResponseSender:
    """Stands for the transport of a response: its head waits for what comes with it, so that a whole answer is one
    write to the socket, and for the end of the loop's turn at most.

    A TLS transport is given long bodies in pieces: it counts as sent what it has passed on, and passes on each write as
    a whole."""

    __slots__ = (
        "_chunked",
        "_close",
        "_flow",
        "_head",
        "_in_pieces",
        "_left",
        "_loop",
        "_started",
        "_transport",
        "written",
    )

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        flow: FlowControl,
        close: Callable[[], None],
        *,
        chunked: bool,
    ) -> None:
        """`close` is called where the connection ends with the response. `chunked`: so are bodies whose length is not
        known."""
        self._transport = transport
        self._close = close
        self._in_pieces = transport.get_extra_info("sslcontext") is not None
        self._loop = loop
        self._flow = flow
        self._chunked = chunked
        self._started = False
        self._head = b""
        self._left: Callable[[], None] | None = None
        self.written = 0
        """Bytes of the response, its head and framing with them."""

    def write(self, data: bytes) -> None:
        self.written += len(data)
        if not self._started:
            self._started = True
            self._head = data
            self._loop.call_soon(self._flush)
        elif self._head and len(data) < _JOINED_BYTES:
            self._transport.write(self._head + data)
            self._head = b""
        else:
            self._flush()
            if self._in_pieces and len(data) > MAX_UNSENT_BYTES:
                for start in range(0, len(data), MAX_UNSENT_BYTES):
                    self._transport.write(memoryview(data)[start : start + MAX_UNSENT_BYTES])
            else:
                self._transport.write(data)

    def write_body(self, data: bytes) -> bool:
        """More of a body of unknown length that has begun, without the coroutine of ASGI's `send`. `data` is not empty.
        False: the client is slow, and `send` would have waited; wait with `drain` before the next call."""
        transport = self._transport
        if transport.is_closing():
            return True
        framed = b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
        if self._head or self._in_pieces:
            self.write(framed)
        else:
            self.written += len(framed)
            transport.write(framed)
        return not self._flow.write_paused

    async def drain(self) -> None:
        """Returns when the client has taken most of what was written, or has left."""
        await self._flow.drain()

    def watch_client(self, left: Callable[[], None]) -> Callable[[], object]:
        self._left = left
        if self._transport.is_closing():
            self._loop.call_soon(self.client_left)
        else:
            self._flow.resume_reading()  # a body that came at once stops it, and nobody receives any more
        return self._stop_watching

    def _stop_watching(self) -> None:
        self._left = None

    def client_left(self) -> None:
        """The connection is lost, or nothing more is read from it."""
        if self._left is not None:
            left, self._left = self._left, None
            left()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self._flush()
        self._close()

    def _flush(self) -> None:
        if self._head:
            self._transport.write(self._head)
            self._head = b""
