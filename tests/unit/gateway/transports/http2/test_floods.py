"""What a client can make one connection cost: each flood ends it, and clients that only work hard never get there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.gateway.transports.http2 import frames
from penstock.gateway.transports.http2.bounds import Http2Limits, PingRules
from penstock.gateway.transports.http2.connection import Http2Connection
from penstock.gateway.transports.http2.frames import FrameType, Http2ErrorCode, Setting, frame
from penstock.gateway.transports.http2.heads import ConnectionFailed
from support.http2 import REQUEST, WHOLE, data, headers, names, started

LIMITS = Http2Limits(
    resets=50, idle_frames=200, settings=20, max_streams=30, pings=PingRules(max_strikes=0, allowed_when_idle=True)
)


def flood(connection: Http2Connection, *rounds: bytes, now: float = 0.0) -> ConnectionFailed:
    """What ends the connection within a thousand rounds."""
    for sent in rounds[:1000]:
        for event in connection.receive(sent, now):
            if isinstance(event, ConnectionFailed):
                return event
    raise AssertionError("the connection lives")


@pytest.mark.parametrize(
    "sent",
    [
        frame(FrameType.PING, 0, 0, bytes(8)),
        frame(FrameType.PING, frames.ACK, 0, bytes(8)),
        frames.settings({}),
        frames.SETTINGS_ACK,
        frame(FrameType.PRIORITY, 0, 9, bytes(5)),
        frame(0x77, 0, 0),
        frames.window_update(0, 1),
        frames.window_update(1, 1),
        frames.go_away(0, 0),
        data(1, b""),
        frame(FrameType.DATA, frames.PADDED, 1, b"\x05" + bytes(5)),
    ],
    ids=lambda sent: sent[:12].hex(),
)
def test_frames_without_use(sent: bytes) -> None:
    connection = started(limits=LIMITS)
    connection.receive(headers(1), 0.0)
    assert flood(connection, *[sent] * 1000).code is Http2ErrorCode.ENHANCE_YOUR_CALM


def test_so_many_per_second_are_borne() -> None:
    connection = started(limits=LIMITS)
    for second in range(1000):
        assert not connection.receive(frames.window_update(0, 1) * 100, float(second))


def test_rapid_reset() -> None:
    rounds = [headers(number) + frames.reset(number, 8) for number in range(1, 2000, 2)]
    assert flood(started(limits=LIMITS), *rounds).text == "too many streams are given up"


def test_streams_beyond_the_limit_and_malformed_requests_count_as_given_up() -> None:
    assert flood(started(limits=LIMITS), *[headers(number) for number in range(1, 2000, 2)])
    bad = [headers(number, [(b"a", b"b")]) for number in range(1, 2000, 2)]
    assert flood(started(limits=LIMITS), *bad)
    windows = [headers(number) + frames.window_update(number, 0) for number in range(1, 2000, 2)]
    assert flood(started(limits=LIMITS), *windows)


def test_hundreds_of_calls_given_up_together_are_no_flood() -> None:
    """Again and again, as long as each has run for a moment, or something of its answer has come."""
    connection = started(limits=LIMITS)
    numbers = iter(range(1, 1 << 20, 2))
    for index in range(500):
        start = index * 0.15
        opened = [next(numbers) for _ in range(30)]
        connection.receive(b"".join([headers(number) for number in opened]), start)
        for number in opened[:10]:
            connection.send_headers(number, b"\x88")
        early, late = opened[:10], opened[10:]
        assert len(connection.receive(b"".join([frames.reset(n, 8) for n in early]), start + 0.01)) == 10
        assert len(connection.receive(b"".join([frames.reset(n, 8) for n in late]), start + 0.11)) == 20


def test_streams_that_are_given_up_too_early_are_borne_at_a_slow_pace() -> None:
    connection = started(limits=LIMITS)
    for number in range(1, 4000, 2):
        sent = headers(number) + frames.reset(number, 8)
        assert names(connection.receive(sent, number / 200)) == ["RequestStarted", "StreamReset"]


@pytest.mark.parametrize(
    "fault",
    [
        lambda n: headers(n) + frames.window_update(n, 0),
        lambda n: headers(n) + frames.window_update(n, frames.MAX_WINDOW),
        lambda n: headers(n, end=True) + data(n, b"x"),
        lambda n: headers(n, end=True) + headers(n),
        lambda n: headers(n) + headers(n, [(b"a", b"b")]),
        lambda n: headers(n) + data(n, bytes(16_384)) * 5,
        lambda n: headers(n, [*REQUEST, (b"content-length", b"1")]) + data(n, b"", end=True),
    ],
)
def test_streams_that_the_server_has_to_reset_count_as_given_up(fault: Callable[[int], bytes]) -> None:
    """CVE-2025-8671: how long they have run does not matter."""
    connection = started(limits=LIMITS)
    for index, number in enumerate(range(1, 400, 2)):
        connection.receive(fault(number), index / 1000)
    assert connection.failed


def test_data_in_tiny_pieces() -> None:
    """Nine bytes of frame for each of data; messages of an ordinary size and their answers earn more."""
    connection = started(limits=LIMITS)
    connection.receive(headers(1), 0.0)
    assert flood(connection, *[data(1, b"x")] * 1000).text == "too many frames without use"
    connection = started(limits=LIMITS)
    connection.receive(headers(1), 0.0)
    for _ in range(2000):
        assert names(connection.receive(data(1, b"short") + data(1, bytes(20)), 0.0)) == ["DataReceived"] * 2
        connection.credit(1, 25)
        connection.send_data(1, b"answer")


def test_a_client_that_gives_up_half_of_what_it_asks_for_is_no_flood() -> None:
    connection = started(limits=LIMITS)
    for number in range(1, 8000, 4):
        events = connection.receive(headers(number, end=True) + headers(number + 2), 0.0)
        assert names(events) == ["RequestStarted", "RequestStarted"]
        connection.send_headers(number, b"\x88", end=True)
        assert names(connection.receive(frames.reset(number + 2, 8), 0.0)) == ["StreamReset"]


def test_a_client_that_acknowledges_every_token_is_no_flood() -> None:
    connection = started(limits=LIMITS)
    connection.receive(headers(1), 0.0)
    for _ in range(5000):
        connection.send_data(1, b"token")
        assert connection.receive(frames.window_update(1, 5) + frames.window_update(0, 5), 0.0) == []


def test_tiny_windows_earn_nothing() -> None:
    """One answer, taken byte by byte."""
    connection = started({Setting.INITIAL_WINDOW_SIZE: 0}, LIMITS)
    connection.receive(headers(1, end=True), 0.0)
    connection.send_data(1, b"x" * 10_000)
    taken = 0
    while not connection.failed:
        taken += len(connection.take_output()[0])
        connection.receive(frames.window_update(1, 1), 0.0)
    assert taken <= 10 * (LIMITS.idle_frames + 3 + 10)


@pytest.mark.parametrize("piece", [b"", b"\0\x01a\x01b" * 2000], ids=["empty", "long"])
def test_continuations_without_end(piece: bytes) -> None:
    connection = started(limits=LIMITS)
    connection.receive(headers(1, flags=0), 0.0)
    event = flood(connection, *[frame(FrameType.CONTINUATION, 0, 1, piece)] * 1000)
    assert event.text == "a header block is too long"


def test_numbers_of_streams_that_were_left_are_remembered_for_a_while() -> None:
    connection = started()
    connection.receive(headers(1), 0.0)
    connection.send_headers(1, b"\x88", end=True)
    for number in range(3, 3 + 2 * 2047, 2):
        connection.receive(headers(number), 0.0)
        connection.send_headers(number, b"\x88", end=True)
    assert connection.receive(data(1, bytes(20)), 0.0) == []
    connection.receive(headers(5001), 0.0)
    connection.send_headers(5001, b"\x88", end=True)
    assert names(connection.receive(data(1, bytes(20)), 0.0)) == ["ConnectionFailed"]


def test_a_small_block_of_many_large_fields() -> None:
    """An entry of the table, named again and again: 16 KiB would become 60 MiB."""
    connection = started(limits=LIMITS)
    entry = b"\x40\x01a\x7f\xa1\x1e" + b"v" * 4000
    connection.receive(headers(1, end=True), 0.0)
    block = b"\x83\x86\x04\x02/a" + entry + b"\xbe" * 10_000
    (event,) = connection.receive(frame(FrameType.HEADERS, WHOLE, 3, block), 0.0)
    assert isinstance(event, ConnectionFailed)
    assert event.text == "the header list is too large"


def test_settings_with_thousands_of_values_cost_as_much_as_one() -> None:
    connection = started(limits=LIMITS)
    for number in range(1, 60, 2):
        connection.receive(headers(number), 0.0)
    values = b"".join([frames.SETTING.pack(Setting.INITIAL_WINDOW_SIZE, 1000 + n % 2) for n in range(2730)])
    changes = 0
    grow = connection._sender.grow_stream

    def counted(*args: object) -> None:
        nonlocal changes
        changes += 1
        grow(*args)  # type: ignore[arg-type]

    connection._sender.grow_stream = counted  # type: ignore[method-assign]
    connection.receive(frame(FrameType.SETTINGS, 0, 0, values), 0.0)
    assert changes == 30


def pings(connection: Http2Connection, *times: float) -> list[bool]:
    """Whether the connection lives after each."""
    ping = frame(FrameType.PING, 0, 0, bytes(8))
    return [not connection.receive(ping, now) and not connection.failed for now in times]


def test_early_pings_strike() -> None:
    rules = PingRules(min_seconds=10, max_strikes=2, allowed_when_idle=True)
    connection = started(limits=Http2Limits(pings=rules))
    assert pings(connection, 0, 10, 20, 21, 22, 23) == [True, True, True, True, True, False]
    connection = started(limits=Http2Limits(pings=rules))
    assert connection.receive(headers(1), 0.0)
    assert pings(connection, 0, 1, 2) == [True, True, True]
    connection.send_headers(1, b"\x88")
    assert pings(connection, 3, 4, 5, 6) == [True, True, True, False]


def test_pings_without_a_stream_must_be_rare_unless_allowed() -> None:
    connection = started(limits=Http2Limits(pings=PingRules(min_seconds=10, max_strikes=1)))
    assert pings(connection, 0, 100, 200) == [True, True, False]
    connection = started(limits=Http2Limits(pings=PingRules(min_seconds=10, max_strikes=1)))
    assert pings(connection, 0, 7200, 14400) == [True, True, True]
