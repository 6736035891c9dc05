"""Frames that are longer than what every peer may send: they cost memory as if they came in several."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.transports.http2 import frames
from penstock.gateway.transports.http2.bounds import Http2Limits
from penstock.gateway.transports.http2.connection import Http2Connection
from penstock.gateway.transports.http2.frames import FrameType, frame
from penstock.gateway.transports.http2.heads import DataReceived, RequestStarted
from support.http2 import END, REQUEST, data, headers, output, started

WIDE = Http2Limits(stream_window=1 << 20)


def padded(payload: bytes, padding: int, *, end: bool) -> bytes:
    flags = frames.PADDED | (END if end else 0)
    return frame(FrameType.DATA, flags, 1, bytes((padding,)) + payload + bytes(padding))


def fed(connection: Http2Connection, sent: bytes, cuts: list[int]) -> list[DataReceived]:
    found, position = [], 0
    for cut in (*cuts, len(sent)):
        found += connection.receive(sent[position : position + cut], 0.0)
        position += cut
    assert all(isinstance(event, DataReceived) for event in found), found
    return [event for event in found if isinstance(event, DataReceived)]


@settings(max_examples=25)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 300, 16_384, 16_385, 16_700, 16_896, 16_897, 40_000, 120_000]), st.integers(-1, 255)
        ),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.integers(1, 30_000), max_size=20),
)
def test_a_body_is_the_same_however_it_is_cut(sizes: list[tuple[int, int]], cuts: list[int]) -> None:
    body = bytes(range(256)) * 2000
    connection = started(limits=WIDE)
    connection.receive(headers(1), 0.0)
    sent, start = b"", 0
    for index, (size, padding) in enumerate(sizes):
        piece, end = body[start : start + size], index == len(sizes) - 1
        sent += data(1, piece, end=end) if padding < 0 else padded(piece, padding, end=end)
        start += size
    found = fed(connection, sent, cuts)
    assert b"".join([event.data for event in found]) == body[:start]
    assert [event.ended for event in found] == [False] * (len(found) - 1) + [True]
    # All bytes count against the window, those of the padding, too.
    counted = start + sum([padding + 1 for _, padding in sizes])
    stream = connection.streams[1]
    assert WIDE.stream_window - stream.receive_window == counted


def test_what_is_held_of_a_long_frame_is_bounded_and_no_piece_is_tiny() -> None:
    connection = started(limits=WIDE)
    connection.receive(headers(1), 0.0)
    payload = b"x" * 500_000
    sent = frame(FrameType.DATA, frames.PADDED, 1, b"\xff" + payload + bytes(255))
    received, step = 0, 1_000
    for position in range(0, len(sent), step):
        for event in connection.receive(sent[position : position + step], 0.0):
            assert isinstance(event, DataReceived)
            assert len(event.data) > 200
            received += len(event.data)
        assert position + step - received <= 16_384 + 512 + step, "more is held than a short frame would be"
        assert connection.in_frame is (position + step < len(sent))
    assert received == len(payload)


def test_the_rest_of_a_long_frame_is_known() -> None:
    connection = started(limits=WIDE)
    connection.receive(headers(1) + data(1, b"x" * 100_000)[: 9 + 20_000], 0.0)
    assert connection.left_of_frame == 80_000


def test_the_end_of_a_long_frame_is_the_end_of_its_stream_only_once_it_has_come() -> None:
    connection = started(limits=WIDE)
    connection.receive(headers(1), 0.0)
    sent = data(1, b"x" * 40_000, end=True) + headers(3)
    (first,) = connection.receive(sent[:30_000], 0.0)
    assert isinstance(first, DataReceived)
    assert not first.ended
    last, other = connection.receive(sent[30_000:], 0.0)
    assert isinstance(last, DataReceived)
    assert last.ended
    assert isinstance(other, RequestStarted)


def test_a_long_frame_beyond_the_window_ends_its_stream() -> None:
    connection = started(limits=Http2Limits(stream_window=65_535))
    connection.receive(headers(1), 0.0)
    connection.receive(data(1, b"x" * 200_000), 0.0)
    assert 1 not in connection.streams
    assert [(kind, number) for kind, _, number, _ in output(connection)] == [(FrameType.RST_STREAM, 1)]


def test_a_header_block_may_be_as_long_as_in_several_frames() -> None:
    connection = started()
    (event,) = connection.receive(headers(1, fields=[*REQUEST, (b"x", b"y" * 20_000)], end=True), 0.0)
    assert isinstance(event, RequestStarted)
    assert event.head.too_large


def test_clients_are_told_how_long_frames_may_be() -> None:
    connection = Http2Connection(Http2Limits(), 0.0)
    _, _, _, payload = output(connection)[0]
    told = dict(frames.SETTING.iter_unpack(payload))
    assert told[frames.Setting.MAX_FRAME_SIZE] == frames.OWN_MAX_FRAME_BYTES
