"""Frames for the client: in order, data as far as windows allow."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.transports.http2 import frames
from penstock.gateway.transports.http2.bounds import Http2Limits, PingJudge
from penstock.gateway.transports.http2.frames import ConnectionFault, FrameType, Http2ErrorCode, Setting
from penstock.gateway.transports.http2.hpack import FORGET_TABLE
from penstock.gateway.transports.http2.streams import OpenStream


@dataclass(slots=True)
class ClientSettings:
    initial_window: int = frames.DEFAULT_WINDOW
    max_frame_bytes: int = frames.MAX_FRAME_BYTES
    header_table_bytes: int = 4096


def read_settings(payload: bytes, settings: ClientSettings) -> None:
    """Changes `settings`. The last value of a setting counts, so a frame with thousands of them costs no more than one
    with six. Raises ConnectionFault."""
    if len(payload) % frames.SETTING.size:
        raise ConnectionFault(Http2ErrorCode.FRAME_SIZE_ERROR, "a SETTINGS frame has a wrong length")
    for name, value in frames.SETTING.iter_unpack(payload):
        if name == Setting.INITIAL_WINDOW_SIZE:
            if value > frames.MAX_WINDOW:
                raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "the initial window is too large")
            settings.initial_window = value
        elif name == Setting.MAX_FRAME_SIZE:
            if not frames.MAX_FRAME_BYTES <= value <= frames.LARGEST_FRAME_BYTES:
                raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "the maximum frame size is out of range")
            settings.max_frame_bytes = value
        elif name == Setting.HEADER_TABLE_SIZE:
            settings.header_table_bytes = value
        elif name == Setting.ENABLE_PUSH and value > 1:
            raise ConnectionFault(Http2ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")


_MAX_DATA_FRAME = 64 << 10
"""However large a frame the client allows: other streams have their turn between two frames."""
_BATCH_BYTES = 256 << 10
"""Data beyond this waits for the next call of `take`."""
_LOW_WATER = 32 << 10
_DEFAULT_TABLE_BYTES = 4096
_DATA, _HEADERS = FrameType.DATA, FrameType.HEADERS
_LAST_BLOCK = frames.END_HEADERS | frames.END_STREAM


class Sender:
    """Headers and control frames leave as they are queued. Data leaves at once where it may, or waits in its stream,
    and streams take turns."""

    def __init__(self, settings: ClientSettings, judge: PingJudge) -> None:
        self._settings = settings
        self._judge = judge
        self._parts: list[bytes | memoryview] = []
        self._ready: dict[int, OpenStream] = {}
        """Streams with data that waits and a window for it, in the order of their turns."""
        self._forget_table = False
        self.window = frames.DEFAULT_WINDOW
        self.size = 0
        """Bytes that `take` would give without any data that waits."""
        self.held = 0
        """Bytes of memory that data takes which waits in streams."""
        self.open = True
        """Data may be sent on. While the client does not read, it waits in its streams."""

    def control(self, frame: bytes) -> None:
        self._parts.append(frame)
        self.size += len(frame)

    def settings_changed(self) -> None:
        if self._settings.header_table_bytes < _DEFAULT_TABLE_BYTES:
            self._forget_table = True

    def headers(self, stream: OpenStream, block: bytes, *, end: bool) -> None:
        stream.answered = True
        if self._forget_table:
            block = FORGET_TABLE + block
            self._forget_table = False
        kind, flags = FrameType.HEADERS, frames.END_STREAM if end else 0
        while len(block) > frames.MAX_FRAME_BYTES:
            self.control(frames.frame(kind, flags, stream.id, block[: frames.MAX_FRAME_BYTES]))
            block, kind, flags = block[frames.MAX_FRAME_BYTES :], FrameType.CONTINUATION, 0
        self.control(frames.frame(kind, flags | frames.END_HEADERS, stream.id, block))
        self._judge.sent()

    def answer_at_once(self, stream: OpenStream, start: bytes, data: bytes, trailers: bytes) -> bool:
        """All three in one piece, where that may leave now; else nothing is done. It is what most answers are. Without
        trailers the data ends the stream."""
        size = len(data)
        small = size and max(len(start), len(trailers)) <= frames.MAX_FRAME_BYTES
        if self._forget_table or not small or not self._at_once(stream, size):
            return False
        head, stream_id = frames.HEADER.pack, stream.id
        first = head(len(start) << 8 | _HEADERS, frames.END_HEADERS, stream_id)
        second = head(size << 8 | _DATA, 0 if trailers else frames.END_STREAM, stream_id)
        if trailers:
            last = head(len(trailers) << 8 | _HEADERS, _LAST_BLOCK, stream_id)
            self.control(b"".join((first, start, second, data, last, trailers)))
        else:
            self.control(b"".join((first, start, second, data)))
        self._sent(size)
        return True

    def _at_once(self, stream: OpenStream, size: int) -> bool:
        """So many bytes of data may leave now, before none that waits."""
        free = self.open and not stream.waiting and not self._ready and self.size < _BATCH_BYTES
        return free and size <= self.window and size <= stream.send_window and size <= frames.MAX_FRAME_BYTES

    def data(self, stream: OpenStream, data: bytes) -> None:
        """`end` comes later, with or without trailers."""
        size = len(data)
        if not size:
            return
        if self._at_once(stream, size):
            self._parts.append(frames.HEADER.pack(size << 8 | _DATA, 0, stream.id) + data)
            self.size += frames.HEADER_BYTES + size
            self._sent(size)
            stream.send_window -= size
            return
        stream.waiting.append(memoryview(data))
        stream.unsent += size
        self.held += size
        if stream.send_window > 0:
            self._ready[stream.id] = stream

    def end(self, stream: OpenStream, trailers: bytes) -> bool:
        """The stream ends when all its data is sent; an empty block stands for no trailers. True: that is now."""
        stream.trailers = trailers
        if stream.waiting:
            return False
        self._end(stream)
        return True

    def _end(self, stream: OpenStream) -> None:
        if stream.trailers:
            self.headers(stream, stream.trailers, end=True)
        else:
            self.control(frames.frame(FrameType.DATA, frames.END_STREAM, stream.id))

    def drop(self, stream: OpenStream) -> None:
        """Nothing more is sent on it."""
        self._ready.pop(stream.id, None)
        self.held -= stream.held
        stream.waiting.clear()
        stream.unsent = stream.started = 0

    def grow_stream(self, stream: OpenStream, increment: int) -> None:
        """Its window; negative where the client has made windows smaller."""
        stream.send_window += increment
        if stream.waiting and stream.send_window > 0:
            self._ready[stream.id] = stream
        else:
            self._ready.pop(stream.id, None)

    def grow(self, increment: int) -> None:
        """The connection's window. Raises ConnectionFault."""
        self.window += increment
        if self.window > frames.MAX_WINDOW:
            raise ConnectionFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "the connection's window is too large")

    def take(self) -> tuple[list[bytes | memoryview], list[OpenStream], list[OpenStream]]:
        """What is to be written now, the streams whose waiting data has become little, and those that have ended."""
        relieved: list[OpenStream] = []
        ended: list[OpenStream] = []
        if self.open and self._ready and self.window > 0:
            self._send_waiting(relieved, ended)
        parts, self._parts, self.size = self._parts, [], 0
        return parts, relieved, ended

    @property
    def more(self) -> bool:
        """Data waits that could be taken now."""
        return self.open and self.window > 0 and bool(self._ready)

    def _send_waiting(self, relieved: list[OpenStream], ended: list[OpenStream]) -> None:
        most = min(self._settings.max_frame_bytes, _MAX_DATA_FRAME)
        while self._ready and self.window > 0 and self.size < _BATCH_BYTES:
            stream = self._ready.pop(next(iter(self._ready)))
            before, held = stream.unsent, stream.held
            size = stream.next_frame(min(most, self.window), self._parts)
            self.held += stream.held - held
            self.size += frames.HEADER_BYTES + size
            self._sent(size)
            if before > _LOW_WATER >= stream.unsent:
                relieved.append(stream)
            if stream.waiting:
                if stream.send_window > 0:
                    self._ready[stream.id] = stream  # behind the others
            elif stream.trailers is not None:
                if stream.trailers:
                    self.headers(stream, stream.trailers, end=True)
                ended.append(stream)

    def _sent(self, size: int) -> None:
        self.window -= size
        self._judge.sent()


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

    def credit(self, stream: OpenStream, size: int) -> None:
        """So many bytes of the stream have been used up."""
        stream.to_acknowledge += size
        increment = min(stream.to_acknowledge, self._stream - stream.receive_window)  # less where `expect` was called
        if increment * 2 > self._stream:
            self._grow(stream, increment)
            stream.to_acknowledge = 0

    def expect(self, stream: OpenStream, size: int) -> None:
        """So many more are going to be used up at once. The window grows when half of that is left of it."""
        if size > 2 * stream.receive_window:
            self._grow(stream, size - stream.receive_window)

    def _grow(self, stream: OpenStream, increment: int) -> None:
        stream.receive_window += increment
        self._sender.control(frames.window_update(stream.id, increment))
