"""Streams: their numbers, their windows, and what waits to be sent on them."""

from __future__ import annotations

from array import array
from collections import deque

from penstock.gateway.transports.http2 import frames
from penstock.gateway.transports.http2.frames import ConnectionFault, Http2ErrorCode, protocol_error


class OpenStream:
    """Of a request that is not over: it is forgotten when both sides have ended."""

    __slots__ = (
        "answered",
        "declared",
        "id",
        "opened",
        "receive_window",
        "received",
        "remote_ended",
        "send_window",
        "started",
        "to_acknowledge",
        "trailers",
        "unsent",
        "waiting",
    )

    def __init__(
        self, stream_id: int, send_window: int, receive_window: int, declared: int | None, opened: float
    ) -> None:
        self.id = stream_id
        self.opened = opened
        """When."""
        self.answered = False
        """The head of an answer has been sent."""
        self.send_window = send_window
        """Below 0 when the client has made windows smaller meanwhile."""
        self.receive_window = receive_window
        self.declared = declared
        """Bytes of the body, where the client has told."""
        self.received = 0
        self.remote_ended = False
        self.to_acknowledge = 0
        """Bytes that have been used up, and of which the client has not been told."""
        self.waiting: deque[memoryview] = deque()
        self.unsent = 0
        """Bytes in `waiting`."""
        self.started = 0
        """Bytes of the first piece that have been sent: they are in memory until all of it is."""
        self.trailers: bytes | None = None
        """A header block that ends the stream when all data is sent; empty: the data ends it."""

    @property
    def held(self) -> int:
        """Bytes of memory that its data takes."""
        return self.unsent + self.started

    def next_frame(self, most: int, parts: list[bytes | memoryview]) -> int:
        """Adds a DATA frame of what waits to `parts`: at most so many bytes, which are returned. It ends the stream
        where nothing comes behind it."""
        first = self.waiting[0]
        size = min(len(first), most, self.send_window)
        if size == len(first):
            self.waiting.popleft()
            self.started = 0
            piece = first
        else:
            piece, self.waiting[0] = first[:size], first[size:]
            self.started += size
        self.unsent -= size
        self.send_window -= size
        last = self.trailers == b"" and not self.waiting
        parts.append(frames.frame_header(frames.FrameType.DATA, frames.END_STREAM if last else 0, self.id, size))
        parts.append(piece)
        return size


MAX_STREAM_ID = 2**31 - 1
_REMEMBERED = 2048
_SKIPS = 16


class StreamNumbers:
    def __init__(self) -> None:
        self.last = 0
        """The highest so far."""
        self._skipped: deque[range] = deque(maxlen=_SKIPS)
        self.accepted = MAX_STREAM_ID
        """The highest that the client may still open, as it has been told."""
        self._left = array("I")
        """In the order in which they were left; four bytes each, since clients can make any connection remember all."""

    def opened(self, stream_id: int) -> None:
        """Those between it and the last one will never be (RFC 9113, 5.1.1)."""
        if stream_id > self.last + 2:
            self._skipped.append(range(self.last + 1, stream_id))
        self.last = stream_id

    def leave(self, stream_id: int) -> None:
        """The stream has ended here before the client has ended it: it may not know yet."""
        self._left.append(stream_id)
        if len(self._left) > _REMEMBERED:
            del self._left[0]

    def left(self, stream_id: int) -> bool:
        return stream_id in self._left

    def ended_by_client(self, stream_id: int) -> None:
        """Nothing more comes for a stream that was left."""
        if stream_id in self._left:
            self._left.remove(stream_id)

    def wrong(self, stream_id: int, *, opening: bool = False) -> ConnectionFault:
        """For a frame that no client has reason to send. `opening`: it would open the stream, were it a new one."""
        if stream_id > self.last:
            return protocol_error("a frame is for a stream that was never opened")
        if opening and any(stream_id in skipped for skipped in self._skipped):
            return protocol_error("a frame is for a stream that was skipped")
        return ConnectionFault(Http2ErrorCode.STREAM_CLOSED, "a frame is for a stream that is over")
