"""The state machine of a connection."""

from __future__ import annotations

from collections.abc import Callable

from penstock.gateway.http2 import frames
from penstock.gateway.http2.client_settings import ClientSettings, read_settings
from penstock.gateway.http2.errors import ConnectionFault, ErrorCode, StreamFault
from penstock.gateway.http2.events import (
    ClientLeaving,
    ConnectionFailed,
    DataReceived,
    Event,
    PingAnswered,
    RequestStarted,
    StreamReset,
)
from penstock.gateway.http2.fields import check_trailers
from penstock.gateway.http2.frame_reader import FrameReader, without_padding
from penstock.gateway.http2.frames import FrameType, Setting
from penstock.gateway.http2.head_cache import HeadReader
from penstock.gateway.http2.limits import Allowance, Http2Limits
from penstock.gateway.http2.pings import PingJudge
from penstock.gateway.http2.receive_windows import ReceiveWindows
from penstock.gateway.http2.sending import Sender
from penstock.gateway.http2.stream_numbers import MAX_STREAM_ID, StreamNumbers
from penstock.gateway.http2.streams import Stream

_LAST_PING = b"penstock"
"""Its answer says that the client knows that no more streams are taken."""
_EARNED_BY_REQUEST = 8
_EARNED_BY_DATA = 3
_EARNED_BYTES = 1024
"""What is sent earns frames without use, by calls and by bytes. Into how many frames the client's windows cut it earns
nothing."""


class Http2Connection:
    """Pure: no sockets, no clock, no tasks. `receive` gives events for bytes; all other calls only queue frames, and
    `take_output` gives what is to be written. Times are seconds of any clock that never goes back.

    A fault of the client's never raises: it is an event, and a frame for the client.
    """

    def __init__(self, limits: Http2Limits, now: float) -> None:
        self._limits = limits
        self._now = now
        self.streams: dict[int, Stream] = {}
        """Those that are not over."""
        self.unfinished = 0
        """Streams that are over and whose handlers still run: the owner counts them. They take the places of streams.
        Otherwise a client could start any number of handlers by giving up each stream at once."""
        self.failed = False
        """Nothing more is received; what is queued is the last."""
        self.client_left = False
        """It opens no more streams."""
        self._settings = ClientSettings()
        self._judge = PingJudge(limits.pings)
        self._sender = Sender(self._settings, self._judge)
        self._heads = HeadReader(limits.max_header_list_bytes, limits.most_header_list_bytes)
        self._resets = Allowance(limits.resets, limits.resets_per_second, now, "too many streams are given up")
        self._idle = Allowance(limits.idle_frames, limits.idle_frames_per_second, now, "too many frames without use")
        self._changes = Allowance(limits.settings, limits.settings_per_second, now, "too many settings")
        self._reader = FrameReader(limits.max_header_block_bytes)
        self._numbers = StreamNumbers()
        self._events: list[Event] = []
        self._on: dict[int, Callable[[int, int, bytes], None]] = {
            FrameType.DATA: self._on_data,
            FrameType.HEADERS: self._on_block,
            FrameType.PRIORITY: self._on_priority,
            FrameType.RST_STREAM: self._on_reset,
            FrameType.SETTINGS: self._on_settings,
            FrameType.PUSH_PROMISE: self._on_push_promise,
            FrameType.PING: self._on_ping,
            FrameType.GOAWAY: self._on_go_away,
            FrameType.WINDOW_UPDATE: self._on_window_update,
        }
        told = {
            Setting.MAX_CONCURRENT_STREAMS: limits.max_streams,
            Setting.INITIAL_WINDOW_SIZE: limits.stream_window,
            Setting.MAX_HEADER_LIST_SIZE: limits.max_header_list_bytes,
        }
        self._sender.control(frames.settings(told))
        self._windows = ReceiveWindows(limits, self._sender)

    # Receiving

    @property
    def begun(self) -> bool:
        """The client has said that it speaks HTTP/2."""
        return self._reader.begun

    @property
    def in_frame(self) -> bool:
        """A frame or a header block has begun and not ended."""
        return self._reader.in_frame

    def receive(self, data: bytes, now: float) -> list[Event]:
        """What these bytes mean. The last event is ConnectionFailed where they end the connection."""
        self._now = now
        if self.failed:
            return []
        try:
            for kind, flags, stream_id, payload in self._reader.feed(data):
                self._frame(kind, flags, stream_id, payload)
        except ConnectionFault as fault:
            self._fail(fault)
        events, self._events = self._events, []
        return events

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        handler = self._on.get(kind)
        if handler is None:
            self._idle.spend(self._now)
            return
        try:
            handler(flags, stream_id, payload)
        except StreamFault as fault:
            self._resets.spend(self._now)
            self._refuse(stream_id, fault.code)

    def _refuse(self, stream_id: int, code: ErrorCode) -> None:
        """Ends a stream for a fault of the client's."""
        self._sender.control(frames.reset(stream_id, code))
        if self._forget(stream_id):
            self._events.append(StreamReset(stream_id, code))

    def _forget(self, stream_id: int, *, at_client: bool = False) -> Stream | None:
        """`at_client`: it is over there, too."""
        stream = self.streams.pop(stream_id, None)
        if stream is not None:
            self._sender.drop(stream)
        if not at_client and (stream is None or not stream.remote_ended):
            self._numbers.leave(stream_id)
        return stream

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> None:
        if not stream_id:
            raise _protocol_error("DATA is for no stream")
        size = len(payload)
        self._windows.received(size)
        data = without_padding(flags, payload)
        stream = self.streams.get(stream_id)
        if stream is None:
            if not self._numbers.left(stream_id):
                raise self._numbers.wrong(stream_id)
            self._idle.spend(self._now)
            return
        if stream.remote_ended:
            raise StreamFault(ErrorCode.STREAM_CLOSED, "data comes behind the end")
        stream.receive_window -= size
        if stream.receive_window < 0:
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR, "more data than the window allows")
        stream.received += len(data)
        ended = bool(flags & frames.END_STREAM)
        if not data and not ended:
            self._idle.spend(self._now)
        if size > len(data):
            self.credit(stream_id, size - len(data))
        _check_length(stream, ended=ended)
        stream.remote_ended = ended
        self._events.append(DataReceived(stream_id, data, ended))

    def _on_block(self, flags: int, stream_id: int, block: bytes) -> None:
        """It is decoded whatever becomes of it: the tables have to follow it."""
        if not stream_id:
            raise _protocol_error("HEADERS is for no stream")
        ended = bool(flags & frames.END_STREAM)
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._on_trailers(stream, self._heads.fields(block), ended)
        elif stream_id > self._numbers.last:
            self._on_request(stream_id, block, ended)
        elif self._numbers.left(stream_id):
            self._heads.fields(block)
            self._idle.spend(self._now)
        else:
            raise self._numbers.wrong(stream_id)

    def _on_trailers(self, stream: Stream, fields: list[tuple[bytes, bytes]], ended: bool) -> None:
        if stream.remote_ended:
            raise StreamFault(ErrorCode.STREAM_CLOSED, "headers come behind the end")
        if not ended:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "trailers do not end their stream")
        check_trailers(fields)
        _check_length(stream, ended=True)
        stream.remote_ended = True
        self._events.append(DataReceived(stream.id, b"", ended=True))

    def _on_request(self, stream_id: int, block: bytes, ended: bool) -> None:
        if not stream_id & 1:
            raise _protocol_error("a client's streams have odd numbers")
        self._numbers.last = stream_id
        head = self._heads.head(block)
        if stream_id > self._numbers.accepted:  # on its way before the client knew; it may send it again elsewhere
            self._idle.spend(self._now)
            self._forget(stream_id)
            return
        if len(self.streams) + self.unfinished >= self._limits.max_streams:
            raise StreamFault(ErrorCode.REFUSED_STREAM, "too many streams")
        if ended and head.content_length:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "the body is shorter than its content-length")
        window = self._limits.stream_window
        stream = Stream(stream_id, self._settings.initial_window, window, head.content_length)
        stream.remote_ended = ended
        self.streams[stream_id] = stream
        self._idle.earn(_EARNED_BY_REQUEST)
        self._events.append(RequestStarted(stream_id, head, ended))

    def _on_priority(self, flags: int, stream_id: int, payload: bytes) -> None:
        """Means nothing any more (RFC 9113, 5.3.2)."""
        if not stream_id:
            raise _protocol_error("PRIORITY is for no stream")
        if len(payload) != 5:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY has a wrong length")
        self._idle.spend(self._now)

    def _on_reset(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM has a wrong length")
        if not stream_id or stream_id > self._numbers.last:
            raise _protocol_error("RST_STREAM is for no open stream")
        if stream_id not in self.streams:
            self._idle.spend(self._now)
            self._numbers.ended_by_client(stream_id)
            return
        self._resets.spend(self._now)
        self._forget(stream_id, at_client=True)
        self._events.append(StreamReset(stream_id, frames.NUMBER.unpack(payload)[0]))

    def _on_settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise _protocol_error("SETTINGS is for a stream")
        if flags & frames.ACK:
            if payload:
                raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement of settings is not empty")
            self._idle.spend(self._now)
            return
        self._changes.spend(self._now)
        before = self._settings.initial_window
        read_settings(payload, self._settings)
        self._sender.settings_changed()
        grown = self._settings.initial_window - before
        if grown:
            for stream in self.streams.values():
                if stream.send_window + grown > frames.MAX_WINDOW:
                    raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "a stream's window is too large")
                self._sender.grow_stream(stream, grown)
        self._answer(frames.SETTINGS_ACK)

    def _on_push_promise(self, flags: int, stream_id: int, payload: bytes) -> None:
        raise _protocol_error("a client cannot push")

    def _on_ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise _protocol_error("PING is for a stream")
        if len(payload) != 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "PING has a wrong length")
        self._idle.spend(self._now)
        if flags & frames.ACK:
            if payload == _LAST_PING:
                self.close_to_new_streams()
            self._events.append(PingAnswered(payload))
            return
        self._judge.received(self._now, idle=not self.streams)
        self._answer(frames.frame(FrameType.PING, frames.ACK, 0, payload))

    def _answer(self, frame: bytes) -> None:
        """To a client that asks without reading the answers, they would pile up."""
        self._sender.control(frame)
        if self._sender.size > self._limits.max_unsent_bytes and not self._sender.open:
            raise ConnectionFault(ErrorCode.ENHANCE_YOUR_CALM, "answers are not read")

    def _on_go_away(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise _protocol_error("GOAWAY is for a stream")
        if len(payload) < 8:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY is too short")
        self._idle.spend(self._now)
        self.client_left = True
        self._events.append(ClientLeaving(frames.NUMBER.unpack_from(payload, 4)[0]))

    def _on_window_update(self, flags: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE has a wrong length")
        self._idle.spend(self._now)
        increment = frames.NUMBER.unpack(payload)[0] & frames.MAX_WINDOW
        if not stream_id:
            if not increment:
                raise _protocol_error("a window grows by nothing")
            self._sender.grow(increment)
            return
        if stream_id > self._numbers.last:
            raise self._numbers.wrong(stream_id)
        if not increment:
            raise StreamFault(ErrorCode.PROTOCOL_ERROR, "a window grows by nothing")
        stream = self.streams.get(stream_id)
        if stream is None:
            return
        if stream.send_window + increment > frames.MAX_WINDOW:
            raise StreamFault(ErrorCode.FLOW_CONTROL_ERROR, "a stream's window is too large")
        self._sender.grow_stream(stream, increment)

    def _fail(self, fault: ConnectionFault) -> None:
        self.failed = True
        for stream in self.streams.values():
            self._sender.drop(stream)
        self.streams.clear()
        self._sender.control(
            frames.go_away(min(self._numbers.last, self._numbers.accepted), fault.code, fault.text.encode())
        )
        self._events.append(ConnectionFailed(fault.code, fault.text))

    # Sending

    def send_headers(self, stream_id: int, block: bytes, *, end: bool = False) -> None:
        """Before any data of the stream. Calls for streams that are over do nothing, here and below."""
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._sender.headers(stream, block, end=end)
            if end:
                self._ended(stream)

    def send_data(self, stream_id: int, data: bytes) -> None:
        stream = self.streams.get(stream_id)
        if stream is not None:
            self._sender.data(stream, data)
            self._idle.earn(_EARNED_BY_DATA + len(data) / _EARNED_BYTES)

    def answer(self, stream_id: int, start: bytes, pieces: tuple[bytes, ...], trailers: bytes) -> None:
        """A whole answer: header block, data, trailers."""
        stream = self.streams.get(stream_id)
        if stream is None:
            return
        if len(pieces) == 1 and self._sender.answer_at_once(stream, start, pieces[0], trailers):
            self._idle.earn(_EARNED_BY_DATA)
            self._ended(stream)
            return
        self.send_headers(stream_id, start)
        for piece in pieces:
            self.send_data(stream_id, piece)
        self.end(stream_id, trailers)

    def end(self, stream_id: int, trailers: bytes = b"") -> None:
        """The answer is complete; it leaves when windows allow. `trailers`: a header block; empty for none."""
        stream = self.streams.get(stream_id)
        if stream is not None and self._sender.end(stream, trailers):
            self._ended(stream)

    def _ended(self, stream: Stream) -> None:
        self._resets.earn(1)
        if not stream.remote_ended:  # the answer is there, and nobody reads the rest of the request
            self._sender.control(frames.reset(stream.id, ErrorCode.NO_ERROR))
        self._forget(stream.id)

    def reset(self, stream_id: int, code: ErrorCode) -> None:
        """Ends a stream; data that waits is dropped."""
        if stream_id in self.streams:
            self._sender.control(frames.reset(stream_id, code))
            self._forget(stream_id)

    def credit(self, stream_id: int, size: int) -> None:
        """So many bytes of a stream's data have been used up: the client may send as many more."""
        stream = self.streams.get(stream_id)
        if stream is not None and not stream.remote_ended:
            self._windows.credit(stream, size)

    def expect(self, stream_id: int, size: int) -> None:
        """So many more bytes are going to be read at once: the window grows to that, so that they need not come in
        small portions. The owner says how many are sane."""
        stream = self.streams.get(stream_id)
        if stream is not None and not stream.remote_ended:
            self._windows.expect(stream, size)

    def ping(self, payload: bytes) -> None:
        """Eight bytes."""
        self._sender.control(frames.frame(FrameType.PING, 0, 0, payload))

    def announce_end(self, text: str) -> None:
        """The client is told to open no more streams; those that it opens before it knows are taken. When it answers
        the ping, or at `close_to_new_streams`, this is over."""
        self._sender.control(frames.go_away(MAX_STREAM_ID, ErrorCode.NO_ERROR, text.encode()))
        self.ping(_LAST_PING)

    def close_to_new_streams(self) -> None:
        """Streams that are not open yet are ignored from now on, and the client is told which. Idempotent."""
        if self._numbers.accepted == MAX_STREAM_ID and not self.failed:
            self._numbers.accepted = self._numbers.last
            self._sender.control(frames.go_away(self._numbers.last, ErrorCode.NO_ERROR))

    @property
    def closed_to_new_streams(self) -> bool:
        return self._numbers.accepted != MAX_STREAM_ID

    def unsent(self, stream_id: int) -> int:
        """Bytes of the stream that wait for the client."""
        stream = self.streams.get(stream_id)
        return 0 if stream is None else stream.unsent

    # Output

    @property
    def has_output(self) -> bool:
        return bool(self._sender.size) or self._sender.more

    def pause(self) -> None:
        """The client does not read: data waits in its streams from now on."""
        self._sender.open = False

    def resume(self) -> None:
        self._sender.open = True

    @property
    def paused(self) -> bool:
        return not self._sender.open

    def take_output(self) -> tuple[bytes, list[int]]:
        """What is to be written now, and the streams of which less waits than before: their writers may go on."""
        parts, relieved, ended = self._sender.take()
        for stream in ended:
            self._resets.earn(1)
            if not stream.remote_ended:
                parts.append(frames.reset(stream.id, ErrorCode.NO_ERROR))
            self._forget(stream.id)
        return b"".join(parts), [stream.id for stream in relieved]


def _protocol_error(text: str) -> ConnectionFault:
    return ConnectionFault(ErrorCode.PROTOCOL_ERROR, text)


def _check_length(stream: Stream, *, ended: bool) -> None:
    declared = stream.declared
    if declared is not None and (stream.received > declared or (ended and stream.received < declared)):
        raise StreamFault(ErrorCode.PROTOCOL_ERROR, "the body is not as long as its content-length")
