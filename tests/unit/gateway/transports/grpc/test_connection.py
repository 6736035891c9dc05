"""A connection without a socket: what is written when, what takes too long, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count
from typing import Any

import grpc
import hpack
import pytest

from penstock.gateway.requests.connections import PortConnections
from penstock.gateway.requests.intake import BodyBudget, UnreadAnswers
from penstock.gateway.requests.tls import TlsSettings
from penstock.gateway.transports.grpc.call import ConnectionSettings
from penstock.gateway.transports.grpc.messages import prefix
from penstock.gateway.transports.grpc.server import GrpcConnection, GrpcPort, Http2Transport
from penstock.gateway.transports.http2 import frames
from penstock.gateway.transports.http2.bounds import Http2Limits
from penstock.gateway.transports.http2.frames import FrameType, Http2ErrorCode, Setting, frame
from support.http2 import begin, data, headers, read_frames

CALL = ((b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/s/m"), (b"content-type", b"application/grpc"))
SETTINGS = ConnectionSettings(max_message_bytes=1 << 20)
SECONDS = 10


async def turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


class Socket(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False
        self.unwritten = 0
        self.reading = True

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return self.unwritten

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


class Client:
    """Of one connection; `handler` serves every method."""

    def __init__(
        self,
        handler: grpc.RpcMethodHandler,
        settings: ConnectionSettings = SETTINGS,
        bodies: int = 1 << 30,
        max_streams: int = 3,
    ) -> None:
        self.bodies = BodyBudget(bodies)
        self.port = GrpcPort(
            settings=settings,
            limits=Http2Limits(max_streams=max_streams, max_header_list_bytes=8192),
            connections=PortConnections(settings.max_connections),
            bodies=self.bodies,
            unread=UnreadAnswers(1 << 30),
            find_handler=lambda _: handler,
        )
        self.socket = Socket()
        self.connection = GrpcConnection(self.port)
        self.connection.connection_made(self.socket)
        self.connection.data_received(begin({Setting.INITIAL_WINDOW_SIZE: 1 << 20}))
        self.looked = 0
        self.numbers = count(1, 2)
        self.decoder = hpack.Decoder()
        self.statuses: dict[int, str] = {}
        self.messages: dict[int, bytes] = {}
        self.others: list[tuple[int, int, bytes]] = []

    async def send(self, *sent: bytes) -> list[bytes]:
        """In one read; what is written until nothing happens any more."""
        self.look()
        self.socket.writes.clear()
        self.looked = 0
        self.connection.data_received(b"".join(sent))
        await turns()
        return self.look()

    def number(self) -> int:
        """Of another stream."""
        return next(self.numbers)

    def look(self) -> list[bytes]:
        writes = self.socket.writes[self.looked :]
        self.looked = len(self.socket.writes)
        for written in writes:
            for kind, _, stream_id, payload in read_frames(written):
                if kind == FrameType.HEADERS:
                    found = dict(self.decoder.decode(payload))
                    status = found.get("grpc-status") or ("" if found[":status"] == "200" else found[":status"])
                    self.statuses[stream_id] = self.statuses.get(stream_id, "") + status
                elif kind == FrameType.DATA:
                    self.messages[stream_id] = self.messages.get(stream_id, b"") + payload
                else:
                    self.others.append((kind, stream_id, payload))
        return self.socket.writes

    def kinds(self) -> list[int]:
        self.look()
        return [kind for kind, _, _ in self.others]

    def tick(self, seconds: float) -> None:
        self.connection.tick(asyncio.get_running_loop().time() + seconds)


def unary(answer: Callable[[bytes, Any], Awaitable[bytes]]) -> grpc.RpcMethodHandler:
    return grpc.unary_unary_rpc_method_handler(answer)


async def echo(data: bytes, rpc: Any) -> bytes:
    return data


def call(stream_id: int, message: bytes = b"m", *extra: tuple[bytes, bytes]) -> bytes:
    return headers(stream_id, [*CALL, *extra]) + data(stream_id, prefix(len(message)) + message, end=True)


async def test_answers_of_one_wake_up_leave_in_one_write() -> None:
    client = Client(unary(echo))
    await client.send()
    (written,) = await client.send(call(1), call(3), call(5))
    assert [stream_id for kind, _, stream_id, _ in read_frames(written) if kind == FrameType.DATA] == [1, 3, 5]
    assert client.statuses == {1: "0", 3: "0", 5: "0"}
    assert client.messages[1] == prefix(1) + b"m"


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (headers(1, [(b":method", b"GET"), *CALL[1:]], end=True), "405"),
        (headers(1, CALL[:3], end=True), "415"),
        (headers(1, [*CALL, (b"grpc-timeout", b"x")], end=True), "3"),
        (headers(1, [*CALL, (b"grpc-encoding", b"br")], end=True), "12"),
        (headers(1, CALL, end=True), "3"),
        (headers(1, CALL) + data(1, b"\0\0\0\0\5abc", end=True), "3"),
        (headers(1, CALL) + data(1, b"\0\0\0", end=True), "3"),
        (headers(1, CALL) + data(1, b"\7\0\0\0\0"), "3"),
        (headers(1, CALL) + data(1, prefix((1 << 20) + 1)), "8"),
        (headers(1, CALL) + data(1, b"\1\0\0\0\3abc", end=True), "3"),
        (headers(1, [*CALL, (b"grpc-encoding", b"gzip")]) + data(1, b"\1\0\0\0\3abc", end=True), "3"),
        (headers(1, [*CALL, (b"a", b"x" * 9000)]), "8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_refused(sent: bytes, status: str) -> None:
    client = Client(unary(echo))
    await client.send(sent)
    while not client.statuses:  # a thread may have a message
        await asyncio.sleep(0.001)
        client.look()
    assert client.statuses == {1: status}
    assert not client.connection.busy
    await client.send(call(3))
    assert client.statuses[3] == "0"


async def test_a_handler_that_fails_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def fail(data: bytes, rpc: Any) -> bytes:
        raise OSError("/secret")

    client = Client(unary(fail))
    (written,) = (await client.send(call(1)))[-1:]
    assert client.statuses == {1: "13"}
    assert b"secret" not in written
    assert "/secret" in caplog.text


class Waiting:
    """A handler that waits; cancelling it may take a while."""

    def __init__(self, *, stubborn: bool = False) -> None:
        self.go = asyncio.Event()
        self.stubborn = stubborn
        self.cancelled = 0
        self.handler = unary(self.serve)

    async def serve(self, data: bytes, rpc: Any) -> bytes:
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            if self.stubborn:
                await self.go.wait()
            raise
        return data


async def test_a_reset_cancels_the_handler_and_it_takes_a_place_until_it_has_ended() -> None:
    waiting = Waiting(stubborn=True)
    client = Client(waiting.handler)
    await client.send(call(1), call(3), call(5))
    await client.send(frames.reset(1, 8), frames.reset(3, 8), frames.reset(5, 8))
    assert waiting.cancelled == 3
    await client.send(call(7))
    waiting.go.set()  # before anything can fail: the handlers resist the end of the test
    assert (FrameType.RST_STREAM, 7, frames.NUMBER.pack(Http2ErrorCode.REFUSED_STREAM)) in client.others
    await client.send()
    await client.send(call(9))
    assert client.statuses == {9: "0"}
    assert not client.connection.busy


async def test_a_call_that_is_given_up_at_once_never_runs() -> None:
    waiting = Waiting()
    client = Client(waiting.handler)
    for number in range(1, 60, 2):
        await client.send(call(number), frames.reset(number, 8))
    assert waiting.cancelled == 0
    assert not client.connection.busy


async def test_a_deadline_ends_the_call() -> None:
    waiting = Waiting()
    client = Client(waiting.handler)
    await client.send(call(1, b"m", (b"grpc-timeout", b"1m")))
    while not client.statuses:
        await asyncio.sleep(0.001)
        client.look()
    assert client.statuses == {1: "4"}
    assert waiting.cancelled == 1


async def test_a_lost_connection_cancels_everything() -> None:
    waiting = Waiting()
    client = Client(waiting.handler)
    await client.send(call(1), call(3))
    client.connection.connection_lost(None)
    for _ in range(5):
        await asyncio.sleep(0)
    assert waiting.cancelled == 2
    assert not client.connection.busy
    assert not len(client.port.connections)


async def test_a_broken_rule_ends_the_connection_and_its_calls() -> None:
    waiting = Waiting()
    client = Client(waiting.handler)
    await client.send(call(1), data(9, b"x"))
    assert client.kinds()[-1] == FrameType.GOAWAY
    assert client.socket.closed
    assert not client.connection.busy


async def test_long_messages_count_as_bodies_while_they_arrive() -> None:
    client = Client(unary(echo), bodies=250_000)
    piece = data(1, b"x" * 16_384)
    await client.send(headers(1, CALL), data(1, prefix(190_000)))
    await client.send(*[piece] * 8)
    assert client.bodies.held > 100_000
    await client.send(headers(3, CALL), data(3, prefix(190_000)))
    await client.send(*[data(3, b"x" * 16_384)] * 5)
    assert client.statuses == {3: "14"}, "no room beside it"
    await client.send(frames.reset(1, 8))
    assert client.bodies.held == 0


async def test_what_is_written_at_once_is_bounded_by_what_the_client_takes() -> None:
    taken: list[int] = []

    async def fill(_: object, rpc: Any) -> None:
        count = 0
        while rpc.write_now(b"x" * 10_000):
            count += 1
        taken.append(count)
        await rpc.write(b"last")

    client = Client(grpc.stream_stream_rpc_method_handler(fill))
    await client.send(headers(1, CALL))
    assert taken[0] * 10_000 < 65_535 + (80 << 10), "the connection's window, and what may wait"
    assert client.statuses == {1: ""}, "only the head"
    await client.send(frames.window_update(0, 1 << 20))
    assert client.statuses == {1: "0"}
    assert client.messages[1].endswith(prefix(4) + b"last")
    assert len(client.messages[1]) == taken[0] * 10_005 + 9


async def test_answers_that_are_compressed_are_not_written_at_once() -> None:
    async def answer(_: object, rpc: Any) -> None:
        assert not rpc.write_now(b"x")
        await rpc.write(b"x" * 1000)

    settings = ConnectionSettings(max_message_bytes=1 << 20, compression_level="high")
    client = Client(grpc.stream_stream_rpc_method_handler(answer), settings)
    await client.send(headers(1, [*CALL, (b"grpc-accept-encoding", b"gzip")]))
    assert client.statuses == {1: "0"}
    assert client.messages[1][:1] == b"\1"


async def test_calls_count_as_memory_even_if_they_send_nothing() -> None:
    """The first 64 KiB of a connection are free; a list of headers of 8 KiB and the call itself take 12 KiB."""
    waiting = Waiting()
    client = Client(waiting.handler, bodies=100_000, max_streams=100)
    long = [*CALL, (b"a", b"x" * 7900)]
    await client.send(*[headers(number, long) for number in range(1, 11, 2)])
    assert client.bodies.held == 0
    await client.send(*[headers(number, long) for number in range(11, 15, 2)])
    assert client.statuses == {11: "14", 13: "14"}, "100,000 bytes are less than what is taken at once"
    await client.send(*[frames.reset(number, 8) for number in range(1, 11, 2)])
    await client.send(headers(15, long))
    assert 15 not in client.statuses


async def test_a_message_is_read_before_the_fault_of_the_next_one_is_told() -> None:
    seen = []

    async def collect(_: object, rpc: Any) -> None:
        while (message := await rpc.read()) is not grpc.aio.EOF:
            seen.append(message)

    client = Client(grpc.stream_stream_rpc_method_handler(collect))
    await client.send(headers(1, CALL), data(1, prefix(3) + b"one" + prefix(3) + b"two" + b"\7\0\0\0\0"))
    assert seen == [b"one", b"two"]
    assert client.statuses == {1: "3"}


async def test_long_reads_are_looked_at_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two slices others have their turn. Nothing more is read meanwhile."""
    client = Client(unary(echo), max_streams=1000)
    await client.send()
    monkeypatch.setattr("penstock.gateway.transports.sockets.http2._SLICE_SECONDS", -1)
    calls = b"".join([call(number, bytes(2000)) for number in range(1, 61, 2)])
    client.connection.data_received(calls)
    assert len(client.connection._calls) < 10
    assert not client.socket.reading
    for _ in range(20):
        await asyncio.sleep(0)
    client.look()
    assert len(client.statuses) == 30
    assert client.socket.reading


async def test_a_client_that_does_not_read_is_not_read_from() -> None:
    """Refusals, for one, would pile up."""
    client = Client(unary(echo), max_streams=100)
    client.port.find_handler = lambda _: None
    await client.send()
    client.connection.pause_writing()
    sent = 0
    while client.socket.reading:
        await client.send(*[call(client.number()) for _ in range(100)])
        sent += 100
        assert sent < 10_000
    client.connection.resume_writing()
    await client.send()
    assert client.socket.reading
    assert len(client.statuses) == sent


async def test_what_waits_for_the_client_is_noted() -> None:
    async def large(message: bytes, rpc: Any) -> bytes:
        return bytes(2 << 20)

    client = Client(unary(large))
    await client.send(call(1))
    assert client.port.unread.held > (2 << 20) - (64 << 10)
    client.connection.tick(0)
    client.connection.tick(1)
    assert client.connection.seconds_to_read > 1000
    client.connection.connection_lost(None)
    assert client.port.unread.held == 0
    assert client.connection.http2.held_bytes < 1000, "of what nobody will read"


async def test_slow_clients_lose_their_calls() -> None:
    settings = replace(SETTINGS, message_idle_seconds=5, message_rate=100, message_seconds=50)
    client = Client(unary(echo), settings)
    await client.send(headers(1, CALL), headers(3, CALL), data(3, prefix(10_000) + b"x" * 1000))
    client.tick(4)
    client.tick(6)
    await client.send()
    assert client.statuses == {1: "4"}
    client.tick(14)
    await client.send()
    assert client.statuses == {1: "4"}
    client.tick(16)
    await client.send()
    assert client.statuses == {1: "4", 3: "4"}


async def test_streams_may_rest_between_messages() -> None:
    async def collect(_: object, rpc: Any) -> None:
        while (message := await rpc.read()) is not grpc.aio.EOF:
            await rpc.write(message)

    settings = replace(SETTINGS, message_idle_seconds=5)
    client = Client(grpc.stream_stream_rpc_method_handler(collect), settings)
    await client.send(headers(1, CALL), data(1, prefix(1) + b"a"))
    client.tick(1000)
    await client.send(data(1, prefix(1) + b"b", end=True))
    assert client.messages[1] == prefix(1) + b"a" + prefix(1) + b"b"
    assert client.statuses == {1: "0"}


async def test_a_client_that_says_nothing_is_cut_off() -> None:
    silent = GrpcConnection(Client(unary(echo)).port)
    socket = Socket()
    silent.connection_made(socket)
    silent.tick(asyncio.get_running_loop().time() + 9)
    assert not socket.closed
    silent.tick(asyncio.get_running_loop().time() + 11)
    assert socket.closed


async def test_a_frame_that_does_not_end_cuts_the_client_off() -> None:
    client = Client(unary(echo))
    client.tick(1000)
    assert not client.socket.closed, "an idle connection lives"
    await client.send(call(1)[:20])
    client.tick(11)
    assert client.socket.closed


async def test_a_frame_that_comes_byte_by_byte_cuts_the_client_off() -> None:
    client = Client(unary(echo), replace(SETTINGS, frame_seconds=1000))
    sent = call(1, bytes(5000))
    for second in range(0, 60, 5):
        client.tick(second)
        await client.send(sent[second * 10 : second * 10 + 50])
    assert not client.socket.closed
    client.tick(61 + 5)
    assert client.socket.closed


async def test_a_client_that_takes_nothing_is_cut_off() -> None:
    client = Client(unary(echo))
    client.socket.unwritten = 10
    client.tick(0)
    client.tick(59)
    client.socket.unwritten = 9
    client.tick(61)
    client.tick(120)
    assert not client.socket.closed
    client.tick(122)
    assert client.socket.closed


async def test_a_stream_whose_data_nobody_takes_is_reset() -> None:
    client = Client(unary(echo))
    large = b"x" * 200_000
    pieces = [data(1, large[start : start + 16_000]) for start in range(0, 200_000, 16_000)]
    await client.send(frames.settings({Setting.INITIAL_WINDOW_SIZE: 10}), headers(1, CALL), data(1, prefix(200_000)))
    await client.send(*pieces, data(1, b"", end=True))
    for seconds in (0, 300, 599):
        client.tick(seconds)
    assert 1 in client.connection.http2.streams
    client.tick(601)
    assert 1 not in client.connection.http2.streams


async def test_silence_after_a_ping_closes_it_and_pings_need_a_call() -> None:
    settings = replace(SETTINGS, keepalive_time=10, keepalive_timeout=5)
    waiting = Waiting()
    client = Client(waiting.handler, settings)
    client.tick(100)
    assert FrameType.PING not in client.kinds(), "not without calls"
    await client.send(call(1))
    client.tick(9)
    client.tick(11)
    await client.send()
    assert client.kinds().count(FrameType.PING) == 1
    client.tick(15)
    client.tick(17)
    assert not client.socket.closed, "something has come since"
    client.tick(22.5)
    assert client.socket.closed


async def test_pings_without_data_are_counted() -> None:
    settings = replace(SETTINGS, keepalive_time=10, keepalive_without_calls=True, max_pings_without_data=2)
    client = Client(unary(echo), settings)
    for _ in range(5):
        client.tick(11)
        await client.send(frames.SETTINGS_ACK)
    assert client.kinds().count(FrameType.PING) == 2
    await client.send(call(1))
    client.tick(11)
    await client.send()
    assert client.kinds().count(FrameType.PING) == 3


async def test_leaving_waits_for_the_client_and_for_calls() -> None:
    waiting = Waiting()
    client = Client(waiting.handler)
    await client.send(call(1))
    client.connection.leave("max_age")
    await client.send(call(3))
    assert [kind for kind in client.kinds() if kind in (FrameType.GOAWAY, FrameType.PING)] == [
        FrameType.GOAWAY,
        FrameType.PING,
    ]
    await client.send(frame(FrameType.PING, frames.ACK, 0, client.others[-1][2]))
    assert client.others[-1] == (FrameType.GOAWAY, 0, frames.NUMBER.pack(3) + frames.NUMBER.pack(0))
    await client.send(call(5))
    assert not client.socket.closed
    waiting.go.set()
    await client.send()
    assert client.statuses == {1: "0", 3: "0"}
    assert client.socket.closed


async def test_the_connection_that_is_idle_longest_makes_room() -> None:
    client = Client(unary(echo), replace(SETTINGS, max_connections=2))
    waiting = Waiting()
    client.port.find_handler = lambda _: waiting.handler
    await client.send(call(1))
    others = []
    for _ in range(3):
        connection, socket = GrpcConnection(client.port), Socket()
        connection.connection_made(socket)
        others.append(socket)
        if socket.closed:
            connection.connection_lost(None)
    assert not client.socket.closed, "it has a call"
    assert others[0].closed


async def test_a_connection_that_is_closed_already_makes_no_more_room() -> None:
    client = Client(unary(echo), replace(SETTINGS, max_connections=2))
    sockets = [Socket() for _ in range(3)]
    for socket in sockets:  # in one turn of the loop: the ones that are closed are still counted
        GrpcConnection(client.port).connection_made(socket)
    assert client.socket.closed
    assert [socket.closed for socket in sockets].count(False) == 2


async def test_a_connection_whose_answer_waits_for_the_window_is_not_idle() -> None:
    async def large(message: bytes, rpc: Any) -> bytes:
        return bytes(2 << 20)

    client = Client(unary(large), replace(SETTINGS, max_connections=1))
    await client.send(call(1))
    assert not client.connection.busy  # the handler has ended
    late = Socket()
    GrpcConnection(client.port).connection_made(late)
    assert late.closed
    assert not client.socket.closed


def transport() -> Http2Transport:
    tls, limits, bodies = TlsSettings(port="grpc"), Http2Limits(), BodyBudget(1 << 20)
    handler = unary(echo)
    return Http2Transport("127.0.0.1", 0, tls, SETTINGS, limits, lambda _: handler, bodies, UnreadAnswers(1 << 20))


async def test_leaving_waits_until_clients_know_and_have_sent_their_calls() -> None:
    server = transport()
    client, connection, late = Socket(), GrpcConnection(server._grpc), Socket()
    connection.connection_made(client)
    connection.data_received(begin() + headers(1, CALL))
    leaving = asyncio.create_task(server.leave(SECONDS))
    await turns()
    ping = next(each for each in read_frames(b"".join(client.writes)) if each[0] == FrameType.PING)
    connection.data_received(headers(3, CALL) + data(3, prefix(2) + b"hi", end=True))
    connection.data_received(frame(FrameType.PING, frames.ACK, 0, ping[3]))
    await turns()
    assert not leaving.done(), "the first call's message is still to come"
    connection.data_received(data(1, prefix(2) + b"hi", end=True))
    await asyncio.wait_for(leaving, SECONDS)
    await turns()
    assert [each[2] for each in read_frames(b"".join(client.writes)) if each[0] == FrameType.DATA] == [3, 1]
    assert client.closed
    GrpcConnection(server._grpc).connection_made(late)  # its TLS handshake took so long
    await turns()
    assert FrameType.GOAWAY in [kind for kind, *_ in read_frames(b"".join(late.writes))]


async def test_leaving_does_not_wait_for_ever() -> None:
    server = transport()
    GrpcConnection(server._grpc).connection_made(Socket())
    await server.leave(0.01)
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", server.port)


async def test_a_connection_whose_handshake_ends_after_the_stop_is_closed() -> None:
    server = transport()
    await server.start()
    await server.stop(SECONDS)
    late = Socket()
    GrpcConnection(server._grpc).connection_made(late)
    assert late.closed
    assert FrameType.GOAWAY in [kind for kind, *_ in read_frames(b"".join(late.writes))]
