"""The rules of RFC 9113, by section: what ends the connection, what ends a stream, and what has to be borne."""

from __future__ import annotations

import pytest

from penstock.gateway.transports.http2 import frames
from penstock.gateway.transports.http2.bounds import Http2Limits
from penstock.gateway.transports.http2.connection import Http2Connection
from penstock.gateway.transports.http2.frames import FrameType, Http2ErrorCode, Setting, frame
from penstock.gateway.transports.http2.heads import ConnectionFailed, DataReceived, RequestStarted, StreamReset
from penstock.gateway.transports.http2.hpack import encode_fields
from support.http2 import END, REQUEST, WHOLE, begin, data, headers, names, output, started

BLOCK = encode_fields(REQUEST)
NUMBER = frames.NUMBER.pack
MAX = frames.MAX_WINDOW
OPEN = headers(1)


def short(value: object) -> str:
    """For the names of tests."""
    return value.name if isinstance(value, Http2ErrorCode) else str(value)[:40]


def setting(name: int, value: int) -> bytes:
    return frame(FrameType.SETTINGS, 0, 0, frames.SETTING.pack(name, value))


def test_a_connection_begins_with_settings_and_acknowledges_those_of_the_client() -> None:
    connection = Http2Connection(Http2Limits(max_streams=7), 0.0)
    kind, flags, stream_id, payload = output(connection)[0]
    assert (kind, flags, stream_id) == (FrameType.SETTINGS, 0, 0)
    assert dict(frames.SETTING.iter_unpack(payload))[Setting.MAX_CONCURRENT_STREAMS] == 7
    assert not connection.begun
    connection.receive(begin(), 0.0)
    assert connection.begun
    assert output(connection) == [(FrameType.SETTINGS, frames.ACK, 0, b"")]


def test_bytes_may_come_one_by_one() -> None:
    connection = Http2Connection(Http2Limits(), 0.0)
    events = []
    for byte in begin() + headers(1) + data(1, b"abc") + data(1, b"", end=True):
        events += connection.receive(bytes((byte,)), 0.0)
    assert names(events) == ["RequestStarted", "DataReceived", "DataReceived"]
    assert events[1:] == [DataReceived(1, b"abc", False), DataReceived(1, b"", True)]
    assert not connection.in_frame


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        # 3.4
        (b"GET / HTTP/1.1\r\n", Http2ErrorCode.PROTOCOL_ERROR),
        (frames.PREFACE + headers(1), Http2ErrorCode.PROTOCOL_ERROR),
        (frames.PREFACE + frames.SETTINGS_ACK, Http2ErrorCode.PROTOCOL_ERROR),
    ],
    ids=short,
)
def test_how_a_connection_must_not_begin(sent: bytes, code: Http2ErrorCode) -> None:
    connection = Http2Connection(Http2Limits(), 0.0)
    (event,) = connection.receive(sent, 0.0)
    assert isinstance(event, ConnectionFailed)
    assert event.code is code


PROTOCOL, FLOW, SIZE = Http2ErrorCode.PROTOCOL_ERROR, Http2ErrorCode.FLOW_CONTROL_ERROR, Http2ErrorCode.FRAME_SIZE_ERROR
CLOSED, COMPRESSION = Http2ErrorCode.STREAM_CLOSED, Http2ErrorCode.COMPRESSION_ERROR
ENDED = headers(1, end=True)
LONG = b"x" * (frames.OWN_MAX_FRAME_BYTES + 1)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        # 4.2, 4.3
        (frame(FrameType.DATA, 0, 1, LONG), SIZE),
        (frame(FrameType.HEADERS, WHOLE, 1, LONG), SIZE),
        (frame(0x77, 0, 0, LONG), SIZE),
        (frame(0x77, 0, 0, b"x" * 32_769), Http2ErrorCode.ENHANCE_YOUR_CALM),
        (frame(FrameType.HEADERS, WHOLE, 1, b"x" * 32_769), Http2ErrorCode.ENHANCE_YOUR_CALM),
        (headers(1, flags=0) + frame(FrameType.PRIORITY, 0, 1, bytes(5)), PROTOCOL),
        (headers(1, flags=0) + headers(3), PROTOCOL),
        (OPEN + frame(FrameType.HEADERS, WHOLE | END, 1, b"\xff"), COMPRESSION),
        (frame(FrameType.HEADERS, 0, 1, b"\xff") + frame(FrameType.CONTINUATION, WHOLE, 1, b"\x80"), COMPRESSION),
        # 5.1: idle, half-closed, closed
        (data(1, b"x"), PROTOCOL),
        (frames.reset(1, 8), PROTOCOL),
        (frames.window_update(1, 1), PROTOCOL),
        (frame(FrameType.CONTINUATION, WHOLE, 1, BLOCK), PROTOCOL),
        (OPEN + frames.reset(1, 8) + data(1, b"x"), CLOSED),
        (OPEN + frames.reset(1, 8) + headers(1), CLOSED),
        (OPEN + frames.reset(1, 8) + headers(1, flags=0) + frame(FrameType.CONTINUATION, WHOLE, 1), CLOSED),
        (OPEN + headers(1, end=True, fields=[(b"a", b"b")]) + frames.reset(1, 8) + data(1, b"x"), CLOSED),
        # 5.1.1
        (headers(2), PROTOCOL),
        (headers(5) + headers(3), PROTOCOL),
        (headers(5) + data(3, b"x"), CLOSED),
        (headers(5, end=True) + headers(7, end=True) + frames.reset(5, 8) + headers(5), CLOSED),
        # 6.1
        (data(0, b"x"), PROTOCOL),
        (OPEN + frame(FrameType.DATA, frames.PADDED, 1, b"\x04abc"), PROTOCOL),
        (OPEN + frame(FrameType.DATA, frames.PADDED, 1), PROTOCOL),
        # 6.2
        (headers(0), PROTOCOL),
        (frame(FrameType.HEADERS, WHOLE | frames.PADDED, 1, b"\xff" + BLOCK), PROTOCOL),
        (frame(FrameType.HEADERS, WHOLE | frames.PRIORITY, 1, b"\0\0"), SIZE),
        # 6.3, 6.4
        (frame(FrameType.PRIORITY, 0, 0, bytes(5)), PROTOCOL),
        (OPEN + frame(FrameType.PRIORITY, 0, 1, bytes(4)), SIZE),
        (frame(FrameType.RST_STREAM, 0, 0, bytes(4)), PROTOCOL),
        (OPEN + frames.reset(3, 8), PROTOCOL),
        (OPEN + frame(FrameType.RST_STREAM, 0, 1, bytes(3)), SIZE),
        # 6.5
        (frame(FrameType.SETTINGS, frames.ACK, 0, bytes(6)), SIZE),
        (frame(FrameType.SETTINGS, 0, 1), PROTOCOL),
        (frame(FrameType.SETTINGS, 0, 0, bytes(5)), SIZE),
        (frame(FrameType.SETTINGS, frames.ACK, 1), PROTOCOL),
        (setting(2, 2), PROTOCOL),
        (setting(4, MAX + 1), FLOW),
        (setting(5, 16_383), PROTOCOL),
        (setting(5, 1 << 24), PROTOCOL),
        # 6.6
        (OPEN + frame(FrameType.PUSH_PROMISE, WHOLE, 1, NUMBER(2) + BLOCK), PROTOCOL),
        (frame(FrameType.PUSH_PROMISE, WHOLE, 2, NUMBER(4) + BLOCK), PROTOCOL),
        # 6.7, 6.8
        (frame(FrameType.PING, 0, 1, bytes(8)), PROTOCOL),
        (frame(FrameType.PING, 0, 0, bytes(7)), SIZE),
        (frame(FrameType.GOAWAY, 0, 1, bytes(8)), PROTOCOL),
        (frame(FrameType.GOAWAY, 0, 0, bytes(7)), SIZE),
        # 6.9
        (frame(FrameType.WINDOW_UPDATE, 0, 0, bytes(3)), SIZE),
        (frames.window_update(0, 0), PROTOCOL),
        (OPEN + frame(FrameType.WINDOW_UPDATE, 0, 1, bytes(5)), SIZE),
        (frames.window_update(0, MAX), FLOW),
        (frames.window_update(0, 1 << 30) * 2, FLOW),
        (OPEN + frames.window_update(1, MAX - 65_535) + setting(4, 65_536), FLOW),
        # 6.10
        (headers(1, flags=0) + data(1, b"x"), PROTOCOL),
        (headers(1, flags=0) + frame(FrameType.CONTINUATION, WHOLE, 3), PROTOCOL),
        (headers(1, flags=0) + headers(1), PROTOCOL),
        (headers(1, flags=0) + frame(0x77, 0, 1), PROTOCOL),
        (OPEN + frame(FrameType.CONTINUATION, WHOLE, 1, BLOCK), PROTOCOL),
        (headers(1, flags=0) + frame(FrameType.CONTINUATION, WHOLE, 0, BLOCK), PROTOCOL),
        (frame(FrameType.CONTINUATION, 0, 1, BLOCK), PROTOCOL),
    ],
    ids=short,
)
def test_what_ends_the_connection(sent: bytes, code: Http2ErrorCode) -> None:
    connection = started()
    event = connection.receive(sent, 0.0)[-1]
    assert isinstance(event, ConnectionFailed)
    assert event.code is code
    kind, _, _, payload = output(connection)[-1]
    assert kind == FrameType.GOAWAY
    assert payload[4:] == NUMBER(code) + event.text.encode()
    assert connection.receive(headers(7), 0.0) == [], "nothing more is received"
    assert not connection.streams


def request(*fields: tuple[bytes, bytes]) -> list[tuple[bytes, bytes]]:
    return [*REQUEST, *fields]


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        # 5.1: half-closed by the client
        (ENDED + data(1, b"x"), CLOSED),
        (ENDED + headers(1), CLOSED),
        # 6.9, 6.9.1
        (OPEN + frames.window_update(1, 0), PROTOCOL),
        (OPEN + frames.window_update(1, MAX), FLOW),
        (OPEN + frames.window_update(1, 1 << 30) * 2, FLOW),
        (ENDED + frames.window_update(1, 0), PROTOCOL),
        (OPEN + data(1, b"x" * 16_384) * 5, FLOW),
        # 8.1
        (OPEN + headers(1, [(b"a", b"b")]), PROTOCOL),
        (OPEN + headers(1, [(b":path", b"b")], end=True), PROTOCOL),
        (OPEN + headers(1, [(b"Upper", b"b")], end=True), PROTOCOL),
        (OPEN + headers(1, [(b"connection", b"close")], end=True), PROTOCOL),
        # 8.1.1
        (headers(1, request((b"content-length", b"3"))) + data(1, b"ab", end=True), PROTOCOL),
        (headers(1, request((b"content-length", b"1"))) + data(1, b"ab"), PROTOCOL),
        (headers(1, request((b"content-length", b"3"))) + data(1, b"ab") + data(1, b"cd"), PROTOCOL),
        (headers(1, request((b"content-length", b"3"))) + data(1, b"a") + headers(1, [], end=True), PROTOCOL),
        (headers(1, request((b"content-length", b"-1"))), PROTOCOL),
        (headers(1, request((b"content-length", b"9" * 20))), PROTOCOL),
        (headers(1, request((b"content-length", b"1")), end=True), PROTOCOL),
        (headers(1, request((b"content-length", b"x"))), PROTOCOL),
        (headers(1, request((b"content-length", b"1"), (b"content-length", b"2"))), PROTOCOL),
        # 8.2.1, 8.2.2
        (headers(1, request((b"Upper", b"x"))), PROTOCOL),
        (headers(1, request((b"", b"x"))), PROTOCOL),
        (headers(1, request((b"a b", b"x"))), PROTOCOL),
        (headers(1, request((b"a", b"x\r\ny"))), PROTOCOL),
        (headers(1, request((b"a", b" x"))), PROTOCOL),
        (headers(1, request((b"a", b"x\n"))), PROTOCOL),
        (headers(1, request((b"a", b"x\0y"))), PROTOCOL),
        (headers(1, request((b"a:", b"x"))), PROTOCOL),
        (headers(1, request((b"\xe4", b"x"))), PROTOCOL),
        (headers(1, request((b"connection", b"close"))), PROTOCOL),
        (headers(1, request((b"keep-alive", b"1"))), PROTOCOL),
        (headers(1, request((b"proxy-connection", b"close"))), PROTOCOL),
        (headers(1, request((b"upgrade", b"h2c"))), PROTOCOL),
        (headers(1, request((b"transfer-encoding", b"chunked"))), PROTOCOL),
        (headers(1, request((b"te", b"gzip"))), PROTOCOL),
        # 8.3, 8.3.1
        (headers(1, [(b"a", b"b"), *REQUEST]), PROTOCOL),
        (headers(1, request((b":status", b"200"))), PROTOCOL),
        (headers(1, request((b":x", b"y"))), PROTOCOL),
        (headers(1, [*REQUEST, REQUEST[2]]), PROTOCOL),
        (headers(1, REQUEST[1:]), PROTOCOL),
        (headers(1, [REQUEST[0], *REQUEST[2:]]), PROTOCOL),
        (headers(1, REQUEST[:2]), PROTOCOL),
        (headers(1, [*REQUEST[:2], (b":path", b"")]), PROTOCOL),
        (headers(1, [*REQUEST[:2], (b":path", b"a")]), PROTOCOL),
        (headers(1, [*REQUEST[:2], (b":path", b"*")]), PROTOCOL),
        (headers(1, [(b":method", b"CONNECT"), *REQUEST[1:]]), PROTOCOL),
        (headers(1, [(b":method", b"P T"), *REQUEST[1:]]), PROTOCOL),
        (headers(1, [*REQUEST[:2], (b":path", b"/\na")]), PROTOCOL),
        (headers(1, request((b"host", b"y"))), PROTOCOL),
        (headers(1, [*REQUEST[:3], (b"host", b"x"), (b"host", b"x")]), PROTOCOL),
    ],
    ids=short,
)
def test_what_ends_a_stream(sent: bytes, code: Http2ErrorCode) -> None:
    """And leaves the others alone."""
    connection = started()
    events = connection.receive(sent, 0.0)
    assert (FrameType.RST_STREAM, 0, 1, NUMBER(code)) in output(connection)
    assert "ConnectionFailed" not in names(events)
    if events:
        assert events[-1] == StreamReset(1, code)
    assert names(connection.receive(headers(3) + data(3, b"x", end=True), 0.0)) == ["RequestStarted", "DataReceived"]
    assert not connection.failed


@pytest.mark.parametrize(
    "sent",
    [
        frame(0x77, 0xFF, 9, b"unknown"),  # 4.1, 5.5
        frame(FrameType.PING, 0xFE, 0, bytes(8)),
        frame(FrameType.PING, 0, 1 << 31, bytes(8)),
        frame(FrameType.DATA, 0xF6, 1, b"x" * 16_384),
        frame(FrameType.WINDOW_UPDATE, 0, 1, NUMBER(1 << 31 | 5)),  # 6.9: the first bit is reserved
        headers(3, flags=0) + frame(FrameType.CONTINUATION, 0, 3) * 3 + frame(FrameType.CONTINUATION, WHOLE, 3),  # 6.10
        headers(3, [(b":method", b"OPTIONS"), REQUEST[1], (b":path", b"*")], end=True),  # 8.3.1
        headers(3, request((b"host", b"X"), (b"te", b"trailers"))),
        headers(3, request((b"content-length", b"0")), end=True),
        headers(3) + frames.reset(3, 0x77),  # 7
        frames.go_away(0, 0x77),
        setting(0x99, 5),  # 6.5.2
        frame(FrameType.PRIORITY, 0, 1, bytes(5)),
        frame(FrameType.PRIORITY, 0, 99, bytes(5)),
        frame(FrameType.PING, frames.ACK, 0, bytes(8)),
        frames.SETTINGS_ACK,
        frame(FrameType.DATA, frames.PADDED, 1, b"\x02\0\0"),
        frames.go_away(0, 0),
    ],
    ids=short,
)
def test_what_has_to_be_borne(sent: bytes) -> None:
    connection = started()
    connection.receive(OPEN, 0.0)
    assert "ConnectionFailed" not in names(connection.receive(sent, 0.0))
    assert connection.receive(data(1, b"x", end=True), 0.0) == [DataReceived(1, b"x", True)]


def test_headers_with_padding_and_priority_in_pieces() -> None:
    connection = started()
    body = b"\x03" + bytes(5) + BLOCK[:4] + bytes(3)
    first = frame(FrameType.HEADERS, END | frames.PADDED | frames.PRIORITY, 1, body)
    pieces = frame(FrameType.CONTINUATION, 0, 1, BLOCK[4:6]) + frame(FrameType.CONTINUATION, WHOLE, 1, BLOCK[6:])
    (event,) = connection.receive(first + pieces, 0.0)
    assert isinstance(event, RequestStarted)
    assert (event.head.path, event.head.authority, event.ended) == (b"/a", b"x", True)


def test_trailers_end_a_request() -> None:
    connection = started()
    connection.receive(OPEN, 0.0)
    assert connection.receive(headers(1, [(b"a", b"b")], end=True), 0.0) == [DataReceived(1, b"", True)]


def test_frames_that_cross_the_end_of_their_stream_are_ignored() -> None:
    """5.1: the client may have sent them before it knew."""
    connection = started()
    connection.receive(OPEN, 0.0)
    connection.reset(1, Http2ErrorCode.CANCEL)
    late = data(1, b"x") + headers(1, [(b"a", b"b")], end=True) + frames.window_update(1, 9) + frames.reset(1, 8)
    assert connection.receive(late, 0.0) == []
    assert names(connection.receive(headers(3, end=True), 0.0)) == ["RequestStarted"]


def test_an_early_answer_tells_the_client_to_stop_sending() -> None:
    """8.1: END_STREAM, then RST_STREAM with NO_ERROR."""
    connection = started()
    connection.receive(OPEN, 0.0)
    connection.send_headers(1, b"\x88", end=True)
    assert output(connection) == [
        (FrameType.HEADERS, END | WHOLE, 1, b"\x88"),
        (FrameType.RST_STREAM, 0, 1, NUMBER(0)),
    ]
    assert connection.receive(data(1, b"x"), 0.0) == []


def test_pings_are_answered() -> None:
    connection = started()
    connection.receive(frame(FrameType.PING, 0, 0, b"12345678"), 0.0)
    assert output(connection) == [(FrameType.PING, frames.ACK, 0, b"12345678")]


def test_a_client_without_a_table_is_told_that_none_is_used() -> None:
    """RFC 7541, 4.2: before the next block, and once."""
    connection = started({Setting.HEADER_TABLE_SIZE: 0})
    connection.receive(headers(1, end=True) + headers(3, end=True), 0.0)
    connection.send_headers(1, b"\x88", end=True)
    connection.send_headers(3, b"\x88", end=True)
    assert [payload for _, _, _, payload in output(connection)] == [b"\x20\x88", b"\x88"]


def test_leaving_in_two_steps() -> None:
    """6.8: streams on their way are taken until the client knows."""
    connection = started()
    connection.receive(headers(1), 0.0)
    connection.announce_end("old")
    (kind, _, _, payload), (ping, _, _, cookie) = output(connection)
    assert (kind, payload) == (FrameType.GOAWAY, NUMBER(MAX) + NUMBER(0) + b"old")
    assert ping == FrameType.PING
    assert names(connection.receive(headers(3), 0.0)) == ["RequestStarted"]
    assert not connection.closed_to_new_streams
    connection.receive(frame(FrameType.PING, frames.ACK, 0, cookie), 0.0)
    assert connection.closed_to_new_streams
    assert output(connection) == [(FrameType.GOAWAY, 0, 0, NUMBER(3) + NUMBER(0))]
    assert connection.receive(headers(5) + data(5, b"x", end=True), 0.0) == []
    assert connection.receive(data(1, b"x", end=True), 0.0) == [DataReceived(1, b"x", True)]


def test_too_many_streams_are_refused_and_those_that_are_worked_on_count() -> None:
    connection = started(limits=Http2Limits(max_streams=2))
    connection.receive(headers(1) + headers(3), 0.0)
    assert connection.receive(headers(5), 0.0) == []
    assert output(connection) == [(FrameType.RST_STREAM, 0, 5, NUMBER(Http2ErrorCode.REFUSED_STREAM))]
    connection.receive(frames.reset(1, 8), 0.0)
    connection.unfinished += 1
    assert connection.receive(headers(7), 0.0) == []
    connection.unfinished -= 1
    assert names(connection.receive(headers(9), 0.0)) == ["RequestStarted"]


def test_a_list_of_headers_that_is_too_large_can_be_answered_up_to_a_point() -> None:
    connection = started()
    limit = Http2Limits().max_header_list_bytes
    (event,) = connection.receive(_long(1, 20_000), 0.0)
    assert isinstance(event, RequestStarted)
    assert event.head.too_large
    assert event.head.size > limit
    (event,) = connection.receive(_long(3, 5_000), 0.0)
    assert isinstance(event, RequestStarted)
    assert not event.head.too_large
    assert isinstance(connection.receive(_long(5, 70_000), 0.0)[-1], ConnectionFailed)


def _long(stream_id: int, size: int) -> bytes:
    """A request whose headers are about so long, in as many frames as it takes."""
    block = encode_fields(request((b"a", b"x" * size)))
    pieces = [block[start : start + 16_000] for start in range(0, len(block), 16_000)]
    kinds = [FrameType.HEADERS] + [FrameType.CONTINUATION] * (len(pieces) - 1)
    last = len(pieces) - 1
    return b"".join(
        [
            frame(kind, WHOLE if index == last else 0, stream_id, piece)
            for index, (kind, piece) in enumerate(zip(kinds, pieces, strict=True))
        ]
    )
