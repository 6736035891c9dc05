"""The state machine of a connection."""

from __future__ import annotations

from collections.abc import Callable

from penstock.gateway.transports.http2 import frames
from penstock.gateway.transports.http2.bounds import ConnectionBounds, Http2Limits, PingJudge
from penstock.gateway.transports.http2.control_frames import ControlFrames
from penstock.gateway.transports.http2.frames import (
    ConnectionFault,
    FrameReader,
    FrameType,
    Http2ErrorCode,
    Setting,
    StreamFault,
    protocol_error,
    without_padding,
    wrong_length,
)
from penstock.gateway.transports.http2.heads import (
    ClientLeaving,
    ConnectionFailed,
    DataReceived,
    Event,
    HeadReader,
    PingAnswered,
    RequestStarted,
    StreamReset,
    check_trailers,
)
from penstock.gateway.transports.http2.sending import ClientSettings, ReceiveWindows, Sender
from penstock.gateway.transports.http2.streams import MAX_STREAM_ID, OpenStream, StreamNumbers

_LAST_PING = b"penstock"
"""Its answer says that the client knows that no more streams are taken."""


class Http2Connection:
    """Pure: no sockets, no clock, no tasks. `receive` gives events for bytes; all other calls only queue frames, and
    `take_output` gives what is to be written. Times are seconds of any clock that never goes back.

    A fault of the client's never raises: it is an event, and a frame for the client.
    """

    def __init__(self, limits: Http2Limits, now: float) -> None:
        self._limits = limits
        self.streams: dict[int, OpenStream] = {}
        """Those that are not over."""
        self.unfinished = 0
        """Streams that are over and whose handlers still run: the owner counts them. They take the places of streams.
        Otherwise a client could start any number of handlers by giving up each stream at once."""
        self.failed = False
        """Nothing more is received; what is queued is the last."""
        self.client_left = False
        """It opens no more streams."""
        self._settings = ClientSettings()
        judge = PingJudge(limits.pings)
        self._sender = Sender(self._settings, judge)
        self._heads = HeadReader(
            limits.max_header_list_bytes, limits.most_header_list_bytes, spaces=limits.spaces_in_values
        )
        self._bounds = ConnectionBounds(limits, now)
        self._reader = FrameReader(limits.max_header_block_bytes)
        self._numbers = StreamNumbers()
        control = ControlFrames(limits, self._bounds, self._settings, self._sender, judge, self._numbers, self.streams)
        self._on: dict[int, Callable[[int, int, bytes], Event | None]] = {
            FrameType.DATA: self._on_data,
            FrameType.HEADERS: self._on_block,
            FrameType.PRIORITY: control.priority,
            FrameType.RST_STREAM: self._on_reset,
            FrameType.SETTINGS: control.settings,
            FrameType.PUSH_PROMISE: control.push_promise,
            FrameType.PING: control.ping,
            FrameType.GOAWAY: control.go_away,
            FrameType.WINDOW_UPDATE: control.window_update,
        }
        settings = {
            Setting.MAX_CONCURRENT_STREAMS: limits.max_streams,
            Setting.INITIAL_WINDOW_SIZE: limits.stream_window,
            Setting.MAX_FRAME_SIZE: frames.OWN_MAX_FRAME_BYTES,
            Setting.MAX_HEADER_LIST_SIZE: limits.max_header_list_bytes,
        }
        self._sender.control(frames.settings(settings))
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

    @property
    def left_of_frame(self) -> int:
        """Bytes that are still to come of a long DATA frame: they are one event."""
        return self._reader.left

    @property
    def finished_frames(self) -> int:
        """So far; the pieces of a long one count each."""
        return self._reader.finished

    def receive(self, data: bytes, now: float) -> list[Event]:
        """What these bytes mean. The last event is ConnectionFailed where they end the connection."""
        self._bounds.now = now
        if self.failed:
            return []
        events: list[Event] = []
        try:
            for kind, flags, stream_id, payload in self._reader.feed(data):
                event = self._frame(kind, flags, stream_id, payload)
                if event is not None:
                    events.append(event)
        except ConnectionFault as fault:
            events.append(self._fail(fault))
        return events

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> Event | None:
        handler = self._on.get(kind)
        if handler is None:
            self._bounds.without_use()
            return None
        try:
            event = handler(flags, stream_id, payload)
        except StreamFault as fault:
            self._bounds.fault()
            return self._refuse(stream_id, fault.code)
        if isinstance(event, ClientLeaving):
            self.client_left = True
        elif isinstance(event, PingAnswered) and event.payload == _LAST_PING:
            self.close_to_new_streams()
        return event

    def _refuse(self, stream_id: int, code: Http2ErrorCode) -> StreamReset | None:
        """Ends a stream for a fault of the client's."""
        self._sender.control(frames.reset(stream_id, code))
        return StreamReset(stream_id, code) if self._forget(stream_id) else None

    def _forget(self, stream_id: int, *, at_client: bool = False) -> OpenStream | None:
        """`at_client`: it is over there, too."""
        stream = self.streams.pop(stream_id, None)
        if stream is not None:
            self._sender.drop(stream)
        if not at_client and (stream is None or not stream.remote_ended):
            self._numbers.leave(stream_id)
        return stream

    def _on_data(self, flags: int, stream_id: int, payload: bytes) -> DataReceived | None:
        if not stream_id:
            raise protocol_error("DATA is for no stream")
        size = len(payload)
        self._windows.received(size)
        data = without_padding(flags, payload) if flags & frames.PADDED else payload
        stream = self.streams.get(stream_id)
        if stream is None:
            if not self._numbers.left(stream_id):
                raise self._numbers.wrong(stream_id)
            self._bounds.without_use()
            return None
        if stream.remote_ended:
            raise StreamFault(Http2ErrorCode.STREAM_CLOSED, "data comes behind the end")
        stream.receive_window -= size
        if stream.receive_window < 0:
            raise StreamFault(Http2ErrorCode.FLOW_CONTROL_ERROR, "more data than the window allows")
        stream.received += len(data)
        ended = bool(flags & frames.END_STREAM)
        if len(data) < self._limits.small_data and not ended:
            self._bounds.without_use()
        if size > len(data):
            self.credit(stream_id, size - len(data))
        if stream.declared is not None:
            _check_length(stream, ended=ended)
        stream.remote_ended = ended
        return DataReceived(stream_id, data, ended)

    def _on_block(self, flags: int, stream_id: int, block: bytes) -> RequestStarted | DataReceived | None:
        """It is decoded whatever becomes of it: the tables have to follow it."""
        if not stream_id:
            raise protocol_error("HEADERS is for no stream")
        ended = bool(flags & frames.END_STREAM)
        stream = self.streams.get(stream_id)
        if stream is not None:
            return self._on_trailers(stream, self._heads.fields(block), ended)
        if stream_id > self._numbers.last:
            return self._on_request(stream_id, block, ended)
        if not self._numbers.left(stream_id):
            raise self._numbers.wrong(stream_id, opening=True)
        self._heads.fields(block)
        self._bounds.without_use()
        return None

    def _on_trailers(self, stream: OpenStream, fields: list[tuple[bytes, bytes]], ended: bool) -> DataReceived:
        if stream.remote_ended:
            raise StreamFault(Http2ErrorCode.STREAM_CLOSED, "headers come behind the end")
        if not ended:
            raise StreamFault(Http2ErrorCode.PROTOCOL_ERROR, "trailers do not end their stream")
        check_trailers(fields)
        _check_length(stream, ended=True)
        stream.remote_ended = True
        return DataReceived(stream.id, b"", ended=True)

    def _on_request(self, stream_id: int, block: bytes, ended: bool) -> RequestStarted | None:
        if not stream_id & 1:
            raise protocol_error("a client's streams have odd numbers")
        self._numbers.opened(stream_id)
        head = self._heads.head(block)
        if stream_id > self._numbers.accepted:  # on its way before the client knew; it may send it again elsewhere
            self._bounds.without_use()
            self._forget(stream_id)
            return None
        if len(self.streams) + self.unfinished >= self._limits.max_streams:
            raise StreamFault(Http2ErrorCode.REFUSED_STREAM, "too many streams")
        if ended and head.content_length:
            raise StreamFault(Http2ErrorCode.PROTOCOL_ERROR, "the body is shorter than its content-length")
        now, window = self._bounds.now, self._limits.stream_window
        stream = OpenStream(stream_id, self._settings.initial_window, window, head.content_length, now)
        stream.remote_ended = ended
        self.streams[stream_id] = stream
        self._bounds.request()
        return RequestStarted(stream_id, head, ended)

    def _on_reset(self, flags: int, stream_id: int, payload: bytes) -> StreamReset | None:
        if len(payload) != 4:
            raise wrong_length("RST_STREAM")
        if not stream_id or stream_id > self._numbers.last:
            raise protocol_error("RST_STREAM is for no open stream")
        stream = self.streams.get(stream_id)
        if stream is None:
            self._bounds.without_use()
            self._numbers.ended_by_client(stream_id)
            return None
        self._bounds.given_up(stream)
        self._forget(stream_id, at_client=True)
        return StreamReset(stream_id, frames.NUMBER.unpack(payload)[0])

    def abandon(self) -> None:
        """Drops what waits in streams, and the ways by which the connection and its parts know each other."""
        for stream in self.streams.values():
            self._sender.drop(stream)
        self.streams.clear()
        self._on = {}

    def _fail(self, fault: ConnectionFault) -> ConnectionFailed:
        self.failed = True
        self.abandon()
        last = min(self._numbers.last, self._numbers.accepted)
        self._sender.control(frames.go_away(last, fault.code, fault.text.encode()))
        return ConnectionFailed(fault.code, fault.text)

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
            self._bounds.sent(len(data))

    def answer(self, stream_id: int, start: bytes, pieces: tuple[bytes, ...], trailers: bytes) -> None:
        """A whole answer: header block, data, trailers; an empty block stands for no trailers."""
        stream = self.streams.get(stream_id)
        if stream is None:
            return
        if len(pieces) == 1 and self._sender.answer_at_once(stream, start, pieces[0], trailers):
            self._bounds.sent(len(pieces[0]))
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

    def _ended(self, stream: OpenStream) -> None:
        self._bounds.answered()
        if not stream.remote_ended:  # the answer is there, and nobody reads the rest of the request
            self._sender.control(frames.reset(stream.id, Http2ErrorCode.NO_ERROR))
        self._forget(stream.id)

    def reset(self, stream_id: int, code: Http2ErrorCode) -> None:
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
        self._sender.control(frames.go_away(MAX_STREAM_ID, Http2ErrorCode.NO_ERROR, text.encode()))
        self.ping(_LAST_PING)

    def close_to_new_streams(self) -> None:
        """Streams that are not open yet are ignored from now on, and the client is told which. Idempotent."""
        if self._numbers.accepted == MAX_STREAM_ID and not self.failed:
            self._numbers.accepted = self._numbers.last
            self._sender.control(frames.go_away(self._numbers.last, Http2ErrorCode.NO_ERROR))

    @property
    def closed_to_new_streams(self) -> bool:
        return self._numbers.accepted != MAX_STREAM_ID

    def unsent(self, stream_id: int) -> int:
        """Bytes of the stream that wait for the client."""
        stream = self.streams.get(stream_id)
        return 0 if stream is None else stream.unsent

    # Output

    @property
    def held_bytes(self) -> int:
        """Of memory, that wait for the client."""
        return self._sender.held + self._sender.size

    @property
    def unread(self) -> bool:
        """So much waits, beside data, that nothing more should be read from the client: what it asks for can only make
        it more."""
        return not self._sender.open and self._sender.size > self._limits.max_unsent_bytes

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
            self._bounds.answered()
            if not stream.remote_ended:
                parts.append(frames.reset(stream.id, Http2ErrorCode.NO_ERROR))
            self._forget(stream.id)
        return b"".join(parts), [stream.id for stream in relieved]


def _check_length(stream: OpenStream, *, ended: bool) -> None:
    declared = stream.declared
    if declared is not None and (stream.received > declared or (ended and stream.received < declared)):
        raise StreamFault(Http2ErrorCode.PROTOCOL_ERROR, "the body is not as long as its content-length")
