"""Windows in both directions, turns between streams, and what waits for a client that does not read."""

from __future__ import annotations

from penstock.gateway.transports.http2 import frames
from penstock.gateway.transports.http2.bounds import Http2Limits
from penstock.gateway.transports.http2.connection import Http2Connection
from penstock.gateway.transports.http2.frames import FrameType, Http2ErrorCode, Setting
from penstock.gateway.transports.http2.heads import ConnectionFailed
from support.http2 import END, data, headers, output, started

TRAILERS = b"\x88"


def sizes(connection: Http2Connection) -> list[tuple[int, int, int]]:
    """Stream, bytes and flags of the DATA frames that leave."""
    return [(sid, len(payload), flags) for kind, flags, sid, payload in output(connection) if kind == FrameType.DATA]


def test_data_waits_for_both_windows() -> None:
    connection = started({Setting.INITIAL_WINDOW_SIZE: 40_000})
    connection.receive(headers(1, end=True) + headers(3, end=True), 0.0)
    connection.send_data(1, b"a" * 100_000)
    assert sizes(connection) == [(1, 16_384, 0), (1, 16_384, 0), (1, 7_232, 0)]
    assert not connection.has_output
    connection.send_data(3, b"b" * 40_000)
    assert sizes(connection) == [(3, 16_384, 0), (3, 9_151, 0)], "65,535 for both"
    connection.receive(frames.window_update(1, 1_000), 0.0)
    assert sizes(connection) == []
    connection.receive(frames.window_update(0, 50_000), 0.0)
    assert sum(size for _, size, _ in sizes(connection)) == 1_000 + 14_465
    assert connection.unsent(1) == 59_000
    assert connection.unsent(3) == 0


def test_windows_that_shrink_below_zero() -> None:
    """6.9.2."""
    connection = started()
    connection.receive(headers(1, end=True), 0.0)
    connection.send_data(1, b"a" * 10_000)
    connection.receive(frames.settings({Setting.INITIAL_WINDOW_SIZE: 5_000}), 0.0)
    assert sizes(connection) == [(1, 10_000, 0)]
    connection.send_data(1, b"a" * 10)
    connection.receive(frames.window_update(1, 5_000), 0.0)
    assert sizes(connection) == []
    connection.receive(frames.window_update(1, 4), 0.0)
    assert sizes(connection) == [(1, 4, 0)]
    connection.receive(frames.settings({Setting.INITIAL_WINDOW_SIZE: 5_006}), 0.0)
    assert sizes(connection) == [(1, 6, 0)]


def test_streams_take_turns() -> None:
    connection = started({Setting.INITIAL_WINDOW_SIZE: 1 << 20})
    connection.receive(headers(1, end=True) + headers(3, end=True) + headers(5, end=True), 0.0)
    for stream_id in (1, 3, 5):
        connection.send_data(stream_id, b"x" * 40_000)
        connection.end(stream_id)
    connection.receive(frames.window_update(0, 1 << 20), 0.0)
    assert [stream_id for stream_id, _, _ in sizes(connection)] == [1, 3, 5, 1, 3, 5, 1, 3, 5]


def test_the_end_follows_the_data() -> None:
    connection = started({Setting.INITIAL_WINDOW_SIZE: 10})
    connection.receive(headers(1, end=True) + headers(3, end=True), 0.0)
    for stream_id, trailers in ((1, TRAILERS), (3, b"")):
        connection.send_headers(stream_id, TRAILERS)
        connection.send_data(stream_id, b"x" * 15)
        connection.end(stream_id, trailers)
    kinds = [(kind, stream_id) for kind, _, stream_id, _ in output(connection)]
    assert kinds == [(FrameType.HEADERS, 1), (FrameType.HEADERS, 3), (FrameType.DATA, 1), (FrameType.DATA, 3)]
    connection.receive(frames.window_update(1, 10) + frames.window_update(3, 10), 0.0)
    assert [(kind, stream_id, flags & END) for kind, flags, stream_id, _ in output(connection)] == [
        (FrameType.DATA, 1, 0),
        (FrameType.HEADERS, 1, END),
        (FrameType.DATA, 3, END),
    ]
    assert not connection.streams


def test_writers_are_told_when_little_waits() -> None:
    connection = started({Setting.INITIAL_WINDOW_SIZE: 100_000})
    connection.receive(headers(1, end=True), 0.0)
    connection.send_data(1, b"x" * 100_000)
    assert connection.take_output()[1] == []
    assert connection.unsent(1) == 100_000 - 65_535
    connection.receive(frames.window_update(0, 10_000), 0.0)
    assert connection.take_output()[1] == [1]


def test_a_reset_drops_what_waits() -> None:
    connection = started({Setting.INITIAL_WINDOW_SIZE: 0})
    connection.receive(headers(1, end=True), 0.0)
    connection.send_data(1, b"x" * 100)
    connection.receive(frames.reset(1, 8) + frames.settings({Setting.INITIAL_WINDOW_SIZE: 1000}), 0.0)
    assert sizes(connection) == []


def test_data_waits_while_the_client_does_not_read_and_answers_to_it_are_bounded() -> None:
    connection = started(limits=Http2Limits(max_unsent_bytes=1000))
    connection.receive(headers(1, end=True), 0.0)
    connection.pause()
    connection.send_data(1, b"x" * 100)
    assert connection.unsent(1) == 100
    ping = frames.frame(FrameType.PING, 0, 0, bytes(8))
    connection.send_headers(1, TRAILERS)
    for _ in range(100):
        events = connection.receive(ping, 0.0)
        if events:
            break
        connection.send_headers(1, TRAILERS)  # else pings strike
    (event,) = events
    assert isinstance(event, ConnectionFailed)
    assert (event.code, event.text) == (Http2ErrorCode.ENHANCE_YOUR_CALM, "answers are not read")


def updates(connection: Http2Connection) -> dict[int, int]:
    found = {}
    for kind, _, stream_id, payload in output(connection):
        if kind == FrameType.WINDOW_UPDATE:
            found[stream_id] = frames.NUMBER.unpack(payload)[0]
    return found


def test_a_stream_s_window_is_given_back_for_what_is_used_up() -> None:
    connection = started()
    connection.receive(headers(1) + data(1, b"x" * 16_384) * 4, 0.0)
    assert updates(connection) == {}
    connection.credit(1, 30_000)
    assert updates(connection) == {}
    connection.credit(1, 3_000)
    assert updates(connection) == {1: 33_000}


def test_a_connection_s_window_is_given_back_at_once() -> None:
    connection = started(limits=Http2Limits(connection_window=100_000))
    connection.receive(headers(1) + headers(3) + data(1, b"x" * 16_384) * 3 + data(3, b"x" * 16_384), 0.0)
    assert updates(connection) == {0: 65_536}


def test_padding_is_used_up_at_once() -> None:
    connection = started()
    connection.receive(headers(1), 0.0)
    padded = frames.frame(FrameType.DATA, frames.PADDED, 1, b"\xff" + bytes(256))
    for _ in range(1000):
        assert not isinstance(connection.receive(padded, 0.0)[-1], ConnectionFailed)
        connection.credit(1, 1)
    assert 1 in connection.streams


def test_a_long_message_gets_a_window_of_its_own_once() -> None:
    connection = started()
    connection.receive(headers(1) + data(1, b"x" * 16_384), 0.0)
    connection.expect(1, 1 << 20)
    assert updates(connection) == {1: (1 << 20) - (65_536 - 16_384)}
    connection.receive(data(1, b"x" * 16_384) * 64, 0.0)
    connection.credit(1, 16_384 * 65)
    assert updates(connection) == {1: 65_536}, "never more than the window beside what is expected"
