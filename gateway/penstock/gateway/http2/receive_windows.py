"""How much clients may still send."""

from __future__ import annotations

from penstock.gateway.http2 import frames
from penstock.gateway.http2.limits import Http2Limits
from penstock.gateway.http2.sending import Sender
from penstock.gateway.http2.streams import Stream


class ReceiveWindows:
    """The connection's window is given back as bytes arrive, so no client can be found to have gone beyond it. Those of
    streams bound what waits to be used up."""

    def __init__(self, limits: Http2Limits, sender: Sender) -> None:
        self._connection = limits.connection_window
        self._stream = limits.stream_window
        self._sender = sender
        self._to_acknowledge = 0
        """Bytes of all streams that the client has not been told to be received."""
        sender.control(frames.window_update(0, self._connection - frames.DEFAULT_WINDOW))

    def received(self, size: int) -> None:
        """On whatever stream."""
        self._to_acknowledge += size
        if self._to_acknowledge * 2 > self._connection:
            self._sender.control(frames.window_update(0, self._to_acknowledge))
            self._to_acknowledge = 0

    def credit(self, stream: Stream, size: int) -> None:
        """So many bytes of the stream have been used up."""
        stream.to_acknowledge += size
        increment = min(stream.to_acknowledge, self._stream - stream.receive_window)  # less where `expect` was called
        if increment * 2 > self._stream:
            self._grow(stream, increment)
            stream.to_acknowledge = 0

    def expect(self, stream: Stream, size: int) -> None:
        """So many more are going to be used up at once. The window grows when half of that is left of it."""
        if size > 2 * stream.receive_window:
            self._grow(stream, size - stream.receive_window)

    def _grow(self, stream: Stream, increment: int) -> None:
        stream.receive_window += increment
        self._sender.control(frames.window_update(stream.id, increment))
