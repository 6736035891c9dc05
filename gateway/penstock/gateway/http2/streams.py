"""One stream: its windows, and what waits to be sent on it."""

from __future__ import annotations

from collections import deque

from penstock.gateway.http2 import frames


class Stream:
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
