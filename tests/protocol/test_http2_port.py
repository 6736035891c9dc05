"""HTTP/2 on the HTTP port, frame by frame: what clients may send, what they get, and what they must not cost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.gateway.requests.browser_rules import BrowserRules
from penstock.gateway.requests.call import RequestJournal
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.transports.http.settings import AppSettings
from penstock.gateway.transports.http.stream import ConnectionLimits
from penstock.gateway.transports.http2 import frames
from penstock.gateway.transports.http2.frames import FrameType, Http2ErrorCode, Setting
from protocol.conftest import Serve, ServerThread
from protocol.fake_dataplane import FakeDataPlane, delta
from protocol.http2_client import Http2Client, request
from protocol.raw_http import connect, receive_all, receive_until, status
from support.http2 import data, headers
from support.keys import api_keys
from support.server import wait_until

TEXT = {"model": "tiny", "prompt": "hi"}
STREAM = {**TEXT, "stream": True}
PATH = "/v1/completions"


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Of a server that all tests share which leave no traces."""
    thread = ServerThread(FakeDataPlane(), AppSettings(), ConnectionLimits()).start()
    yield thread.port
    thread.close()


@pytest.fixture
def client(port: int) -> Iterator[Http2Client]:
    with Http2Client(port) as found:
        yield found


def test_an_answer_and_a_stream(client: Http2Client) -> None:
    client.ask(PATH, 1, TEXT)
    answer = client.answer(1)
    assert answer.status == 200
    assert b"one two three" in answer.body
    assert int(answer.heads[0]["content-length"]) == len(answer.body)
    assert {"date", "x-request-id", "content-type"} <= set(answer.heads[0])
    assert not {"connection", "transfer-encoding"} & set(answer.heads[0])
    client.ask(PATH, 3, STREAM)
    assert client.answer(3).body.endswith(b"data: [DONE]\n\n")


def test_both_versions_share_a_port_also_when_the_first_bytes_come_one_by_one(port: int) -> None:
    with connect(port) as client:
        for byte in b"POST":
            client.sendall(bytes([byte]))
        client.sendall(b" /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert status(receive_until(client, b"}")) == 405
    with connect(port) as client:
        for byte in frames.PREFACE[:-1]:
            client.sendall(bytes([byte]))
        client.sendall(frames.PREFACE[-1:] + frames.settings({}) + headers(1, request("/health"), end=True))
        assert b'{"status":"live"}' in receive_until(client, b"}")


def test_what_begins_like_http2_and_is_not_is_told_so(port: int) -> None:
    with connect(port) as client:
        client.sendall(b"PRINT / HTTP/1.1\r\n\r\n")
        assert b"HTTP/2 only" in receive_all(client)


def test_without_http2_its_preface_is_no_request(serve: Serve) -> None:
    with connect(serve(http2=False).port) as client:
        client.sendall(frames.PREFACE)
        answer = receive_all(client)
    assert (status(answer), b"Invalid HTTP request." in answer) == (400, True), answer


def test_frames_of_streams_that_are_ready_together_leave_in_one_write(serve: Serve) -> None:
    """A thousand tokens in one turn of the loop are one packet or few, not a thousand."""
    gate = asyncio.Event()
    server = serve(FakeDataPlane(lambda _: [[delta(0, "a")], gate, [delta(0, "b", "stop")]]))
    with Http2Client(server.port) as client:
        for index in range(50):
            client.ask(PATH, 1 + 2 * index, STREAM)
        client.read_until(lambda: sum(b'"a"' in each.body for each in client.answers.values()) == 50)
        [connection] = server.server._connections
        writes: list[int] = []
        server.do(_spy(connection, writes, gate))
        for index in range(50):
            assert client.answer(1 + 2 * index).body.endswith(b"data: [DONE]\n\n")
    assert len(writes) <= 5


async def _spy(connection: Any, writes: list[int], gate: asyncio.Event) -> None:
    class Spy:
        def __init__(self, transport: Any) -> None:
            self.transport = transport

        def __getattr__(self, name: str) -> Any:
            return getattr(self.transport, name)

        def write(self, sent: bytes) -> None:
            writes.append(len(sent))
            self.transport.write(sent)

    connection._transport = Spy(connection._transport)
    gate.set()


def test_head_has_the_length_and_no_body(client: Http2Client) -> None:
    client.send(headers(1, request("/v1/models", method=b"HEAD"), end=True))
    answer = client.answer()
    assert (answer.status, answer.body) == (200, b"")
    assert int(answer.heads[0]["content-length"]) > 0


def test_errors_have_the_form_of_their_protocol(client: Http2Client) -> None:
    client.ask(PATH, 1, b"{")
    assert (client.answer(1).status, client.answer(1).code) == (400, "None")
    client.ask("/nothing", 3)
    assert client.answer(3).status == 404
    client.ask("/v1/messages", 5, {"model": "none", "max_tokens": 1, "messages": []})
    assert b'"type":"error"' in client.answer(5).body


def test_expect_is_answered_before_the_body_is_sent(client: Http2Client) -> None:
    client.send(headers(1, request(PATH, (b"expect", b"100-continue"), method=b"POST")))
    client.read_until(lambda: client.on(1).heads)
    assert client.on(1).status == 100
    client.send(data(1, b'{"model": "tiny", "prompt": "hi"}', end=True))
    assert client.answer(1).status == 200
    client.send(headers(3, request(PATH, (b"expect", b"100-continue"), (b"content-length", b"9" * 12), method=b"POST")))
    assert [head[":status"] for head in client.answer(3).heads] == ["413"]


def test_grpc_is_told_where_it_is(client: Http2Client) -> None:
    fields = request(
        "/inference.GRPCInferenceService/ServerLive", (b"content-type", b"application/grpc"), method=b"POST"
    )
    client.send(headers(1, fields), data(1, b"\0\0\0\0\0", end=True))
    [head] = client.answer(1).heads
    assert (head[":status"], head["grpc-status"]) == ("200", "12")
    assert "--grpc-port" in head["grpc-message"]


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("no path", [(b":method", b"GET"), (b":scheme", b"http")]),
        ("no method", [(b":path", b"/health"), (b":scheme", b"http")]),
        ("no scheme", [(b":method", b"GET"), (b":path", b"/health")]),
        ("an empty path", request("")),
        ("a path without a slash", request("health")),
        ("a host that is not the authority", request("/health", (b"host", b"evil"), authority=b"localhost")),
        ("a path twice", [*request("/health"), (b":path", b"/health")]),
        ("a pseudo-field of answers", [(b":status", b"200"), *request("/health")]),
        ("a pseudo-field behind others", [*request("/health"), (b"a", b"b"), (b":authority", b"x")]),
        ("connection", request("/health", (b"connection", b"close"))),
        ("transfer-encoding", request("/health", (b"transfer-encoding", b"chunked"))),
        ("upgrade", request("/health", (b"upgrade", b"websocket"))),
        ("te", request("/health", (b"te", b"gzip"))),
        ("capital letters", request("/health", (b"Accept", b"*/*"))),
        ("a line in a value", request("/health", (b"a", b"b\r\nc: d"))),
        ("two lengths", request("/health", (b"content-length", b"1"), (b"content-length", b"2"))),
        ("CONNECT", [(b":method", b"CONNECT"), (b":authority", b"evil:1")]),
        ("CONNECT with a path", request("/health", method=b"CONNECT")),
    ],
)  # fmt: skip
def test_a_malformed_request_ends_its_stream_and_nothing_else(client: Http2Client, name: str, fields: Any) -> None:
    client.send(headers(1, fields, end=True))
    assert client.answer(1).reset is Http2ErrorCode.PROTOCOL_ERROR
    client.ask("/health", 3)
    assert client.answer(3).status == 200


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("a long path", request("/health?" + "x" * 9000), 414),
        ("a path of 7 KiB", request("/health?" + "x" * 7000), 200),
        ("a large header", request("/health", (b"a", b"b" * (65 << 10))), 431),
        ("a large header that fits", request("/health", (b"a", b"b" * (60 << 10))), 200),
        ("101 headers", request("/health", *[(b"a", b"b")] * 101), 431),
        ("a space in the path", request("/health /x"), 400),
        ("a control character", request("/health", (b"access-control-request-headers", b"a\x01b")), 400),
        ("a path that is not ASCII", request("/h\u00e9alth"), 400),
        ("host is authority", request("/health", (b"host", b"LOCALHOST"), authority=b"localhost"), 200),
        ("host alone", request("/health", (b"host", b"localhost"), authority=b""), 200),
        ("none", request("/health", authority=b""), 200),
    ],
)  # fmt: skip
def test_a_head_that_is_refused_is_answered(client: Http2Client, name: str, fields: Any, expected: int) -> None:
    block = headers(1, fields, end=True)
    client.send(block if len(block) < frames.MAX_FRAME_BYTES else _in_pieces(fields))
    assert client.answer(1).status == expected


def test_what_is_counted_by_method_has_no_words_of_clients(serve: Serve) -> None:
    """Each word would be a label for ever, of up to 64 KiB."""
    ended: list[RequestContext] = []
    server = serve(journal=RequestJournal([ended.append]))
    with Http2Client(server.port) as client:
        for stream_id, method in ((1, b"SPAM-1"), (3, b"GET")):
            client.send(headers(stream_id, request("/health", method=method), end=True))
            client.answer(stream_id)
    wait_until(lambda: len(ended) == 2)
    assert [each.record.method for each in ended] == ["OTHER", "GET"]


def _in_pieces(fields: Any) -> bytes:
    block = headers(1, fields)[frames.HEADER_BYTES :]
    most = frames.MAX_FRAME_BYTES
    pieces = [block[start : start + most] for start in range(0, len(block), most)]
    sent = frames.frame(FrameType.HEADERS, frames.END_STREAM, 1, pieces[0])
    for piece in pieces[1:-1]:
        sent += frames.frame(FrameType.CONTINUATION, 0, 1, piece)
    return sent + frames.frame(FrameType.CONTINUATION, frames.END_HEADERS, 1, pieces[-1])


def test_the_browser_guard_goes_by_the_authority(serve: Serve) -> None:
    server = serve(browsers=BrowserRules(hosts=frozenset({"known"})))
    for authority, more, expected in (
        (b"known", (), 200),
        (b"evil", (), 403),
        (b"known", ((b"origin", b"http://evil"),), 403),
    ):
        with Http2Client(server.port) as client:
            body = b'{"model": "tiny", "prompt": "hi"}'
            client.send(headers(1, request(PATH, *more, method=b"POST", authority=authority)), data(1, body, end=True))
            assert client.answer(1).status == expected


def test_keys_and_cross_origin_headers(serve: Serve) -> None:
    server = serve(keys=api_keys({"red": "key"}), browsers=BrowserRules(origins=frozenset({"http://page"})))
    with Http2Client(server.port) as client:
        client.ask(PATH, 1, TEXT)
        assert client.answer(1).status == 401
        client.ask(PATH, 3, TEXT, (b"authorization", b"Bearer key"), (b"origin", b"http://page"))
        assert client.answer(3).status == 200
        assert client.answer(3).heads[0]["access-control-allow-origin"] == "http://page"
        preflight = request(
            PATH, (b"origin", b"http://page"), (b"access-control-request-method", b"POST"), method=b"OPTIONS"
        )
        client.send(headers(5, preflight, end=True))
        assert "access-control-allow-methods" in client.answer(5).heads[0]


# Bodies


@pytest.mark.parametrize(("length", "sent"), [(b"10", b"x" * 9), (b"10", b"x" * 11)])
def test_a_body_that_is_not_as_long_as_it_says_ends_its_stream(client: Http2Client, length: bytes, sent: bytes) -> None:
    client.send(headers(1, request(PATH, (b"content-length", length), method=b"POST")), data(1, sent, end=True))
    assert client.answer(1).reset is Http2ErrorCode.PROTOCOL_ERROR


def test_trailers_end_a_body_and_are_no_headers(serve: Serve) -> None:
    server = serve(keys=api_keys({"red": "key"}))
    with Http2Client(server.port) as client:
        client.send(headers(1, request(PATH, method=b"POST")), data(1, b"{}"))
        client.send(headers(1, [(b"authorization", b"Bearer key")], end=True))
        assert client.answer(1).status == 401


def test_a_body_over_the_limit_is_refused_before_it_has_come(serve: Serve) -> None:
    """The rest is read and dropped for a while, so that clients which are still sending see the answer."""
    with Http2Client(serve(max_body_bytes=100, limits=ConnectionLimits(body_idle_timeout=1)).port) as client:
        client.send(headers(1, request(PATH, (b"content-length", b"101"), method=b"POST")))
        client.read_until(lambda: client.on(1).body.endswith(b"}}"))
        assert (client.on(1).status, client.on(1).code) == (413, "payload_too_large")
        client.send(data(1, b" " * 101, end=True))
        assert client.answer(1).reset is None
        client.send(headers(3, request(PATH, method=b"POST")), *[data(3, b" " * 60) for _ in range(3)])
        assert client.answer(3).status == 413
        client.read_until(lambda: client.on(3).reset is Http2ErrorCode.NO_ERROR)
        client.send(*[data(3, b" " * 60) for _ in range(3)])  # it does not know yet
        client.ask("/health", 5)
        assert client.answer(5).status == 200


def test_a_body_of_many_windows_arrives(client: Http2Client) -> None:
    """The client waits for the server's windows, as all clients do."""
    body = b'{"model": "tiny", "prompt": "hi"' + b" " * (1 << 20) + b"}"
    client.send(headers(1, request(PATH, (b"content-length", b"%d" % len(body)), method=b"POST")))
    room, sent, position = 65535, 0, 0
    while sent < len(body):
        size = min(room - sent, len(body) - sent, frames.MAX_FRAME_BYTES)
        if size > 0:
            client.send(data(1, body[sent : sent + size], end=sent + size == len(body)))
            sent += size
            continue
        client.read_until(lambda position=position: FrameType.WINDOW_UPDATE in client.seen[position:])
        position = len(client.seen)
        room += client.grown(1)
    assert client.answer(1).status == 200


def test_an_upload_that_does_not_go_on_is_given_up_and_one_that_is_not_read_is_not(serve: Serve) -> None:
    server = serve(limits=ConnectionLimits(body_idle_timeout=0.3))
    with Http2Client(server.port) as client:
        client.send(headers(1, request(PATH, method=b"POST")), data(1, b"{"))
        assert (client.answer(1).status, client.answer(1).code) == (408, "request_timeout")
        client.ask("/health", 3)
        assert client.answer(3).status == 200
    assert server.do(server.settings.drain.wait_idle(20))


def test_a_reset_in_an_upload_ends_its_handler(serve: Serve) -> None:
    server = serve()
    with Http2Client(server.port) as client:
        client.send(headers(1, request(PATH, method=b"POST")), data(1, b"{"))
        wait_until(lambda: server.settings.drain.in_flight == 1)
        client.send(frames.reset(1, Http2ErrorCode.CANCEL))
        assert server.do(server.settings.drain.wait_idle(20))
        client.ask(PATH, 3, TEXT)
        assert client.answer(3).status == 200


# Streams


def test_a_reset_stream_is_closed_at_once_and_its_neighbours_go_on(serve: Serve) -> None:
    gate = asyncio.Event()
    dataplane = FakeDataPlane(lambda _: [[delta(0, "a")], gate, [delta(0, "b", "stop")]])
    server = serve(dataplane)
    with Http2Client(server.port) as client:
        for stream_id in (1, 3):
            client.ask(PATH, stream_id, STREAM)
            client.read_until(lambda stream_id=stream_id: b'"a"' in client.on(stream_id).body)
        client.send(frames.reset(1, Http2ErrorCode.CANCEL))
        server.do(dataplane.generations[0].closed.wait())
        assert not dataplane.generations[1].closed.is_set()
        server.do(_set(gate))
        assert client.answer(3).body.endswith(b"data: [DONE]\n\n")


async def _set(event: asyncio.Event) -> None:
    event.set()


def test_a_lost_connection_closes_all_of_its_streams(serve: Serve) -> None:
    dataplane = FakeDataPlane(lambda _: [[delta(0, "a")], asyncio.Event()])
    server = serve(dataplane)
    with Http2Client(server.port) as client:
        for stream_id in (1, 3, 5):
            client.ask(PATH, stream_id, STREAM)
        client.read_until(lambda: sum(b'"a"' in each.body for each in client.answers.values()) == 3)
    for generation in dataplane.generations:
        server.do(generation.closed.wait())
    assert server.do(server.settings.drain.wait_idle(20))
    assert server.server.connections == 0


def test_more_streams_than_are_allowed_are_refused_also_when_they_are_given_up_at_once(serve: Serve) -> None:
    gate = asyncio.Event()
    dataplane = FakeDataPlane()
    dataplane.admit = gate
    server = serve(dataplane, limits=ConnectionLimits(max_streams=2))
    with Http2Client(server.port) as client:
        for stream_id in (1, 3, 5):
            client.ask(PATH, stream_id, STREAM)
        assert client.answer(5).reset is Http2ErrorCode.REFUSED_STREAM
        server.do(_set(gate))
        assert client.answer(1).status == client.answer(3).status == 200
        client.ask(PATH, 7, STREAM)
        assert client.answer(7).status == 200


def test_requests_beyond_those_of_all_connections_are_turned_away(serve: Serve) -> None:
    dataplane = FakeDataPlane(lambda _: [asyncio.Event()])
    server = serve(dataplane, limits=ConnectionLimits(max_connections=3))
    with Http2Client(server.port) as client:
        for stream_id in (1, 3, 5):
            client.ask(PATH, stream_id, TEXT)
        wait_until(lambda: len(dataplane.generations) == 3)
        client.ask(PATH, 7, TEXT)
        assert client.answer(7).status == 503
        assert "retry-after" in client.answer(7).heads[0]
        client.ask("/health", 9)
        assert client.answer(9).status == 200, "a full server is well"


def test_tokens_merge_for_a_client_whose_window_is_closed(serve: Serve) -> None:
    """Nothing is taken from the engine while much waits, so what has merged comes when it reads."""
    asked = 0

    def flood(_: Any) -> Iterator[Any]:
        nonlocal asked
        while asked < 1000:
            asked += 1
            yield [delta(0, "x" * 1024)]
        yield [delta(0, "end", "stop")]

    server = serve(FakeDataPlane(flood))
    with Http2Client(server.port, {Setting.INITIAL_WINDOW_SIZE: 0}) as client:
        client.ask(PATH, 1, STREAM)
        client.ask("/health", 3)
        client.send(frames.window_update(3, 1000))
        assert client.answer(3).status == 200, "others go on"
        wait_until(lambda: asked > 20)
        for _ in range(3):
            client.ask("/health", 5 + 2 * _)
            client.send(frames.window_update(5 + 2 * _, 1000))
            client.answer(5 + 2 * _)
        assert asked < 60, "at most some 32 KiB wait"
        client.send(frames.window_update(1, 1 << 24), frames.window_update(0, 1 << 24))
        assert client.answer(1).body.endswith(b"data: [DONE]\n\n")


def test_a_stream_that_is_not_read_is_cut_off_and_the_connection_is_not(serve: Serve) -> None:
    dataplane = FakeDataPlane(lambda _: ([delta(0, "x" * 4096)] for _ in iter(int, 1)))
    server = serve(dataplane, limits=ConnectionLimits(send_timeout=0.5))
    with Http2Client(server.port, {Setting.INITIAL_WINDOW_SIZE: 100}) as client:
        client.ask(PATH, 1, STREAM)
        assert client.answer(1).reset is Http2ErrorCode.CANCEL
        server.do(dataplane.generations[0].closed.wait())
        client.send(frames.settings({Setting.INITIAL_WINDOW_SIZE: 1000}))
        client.ask("/health", 3)
        assert client.answer(3).status == 200


def test_a_client_that_does_not_read_its_socket_is_cut_off(serve: Serve) -> None:
    dataplane = FakeDataPlane(lambda _: ([delta(0, "x" * 4096)] for _ in iter(int, 1)))
    server = serve(dataplane, limits=ConnectionLimits(send_timeout=0.5))
    sock = connect(server.port, receive_buffer=4096)
    with Http2Client(server.port, {Setting.INITIAL_WINDOW_SIZE: 1 << 30}, sock) as client:
        client.send(frames.window_update(0, 1 << 30))
        client.ask(PATH, 1, STREAM)
        server.do(dataplane.generating.wait())
        server.do(dataplane.generations[0].closed.wait())
        assert server.do(server.settings.drain.wait_idle(20))
        wait_until(lambda: server.server.connections == 0)


# The end of connections


def test_a_broken_frame_ends_the_connection_with_a_reason(client: Http2Client) -> None:
    client.send(frames.frame(FrameType.PUSH_PROMISE, 0, 1, b"\0\0\0\2"))
    client.read_all()
    assert client.left == (0, Http2ErrorCode.PROTOCOL_ERROR, "a client cannot push")


def test_a_client_that_says_nothing_more_is_closed(serve: Serve) -> None:
    limits = ConnectionLimits(header_timeout=0.3, keep_alive_timeout=0.3)
    port = serve(limits=limits).port
    starts = (b"PR", b"PRI * HT", frames.PREFACE, frames.PREFACE + frames.settings({}) + b"\0\0")
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(port)) for _ in starts]
        for client, sent in zip(clients, starts, strict=True):
            client.sendall(sent)
        for client in clients:
            receive_all(client)


def test_idle_connections_are_told_and_closed(serve: Serve) -> None:
    with Http2Client(serve(limits=ConnectionLimits(keep_alive_timeout=1)).port) as client:
        client.ask("/health")
        assert client.answer().status == 200
        client.read_all()
        assert client.left is not None
        assert client.left[:2] == (1, Http2ErrorCode.NO_ERROR)


def test_an_idle_connection_makes_room_for_one_of_either_version(serve: Serve) -> None:
    server = serve(limits=ConnectionLimits(max_connections=1))
    for _ in range(2):
        with Http2Client(server.port) as client:
            client.ask("/health")
            assert client.answer().status == 200
            with connect(server.port) as other:
                other.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert status(receive_until(other, b"}")) == 200
                client.read_all()
                with Http2Client(server.port) as third:
                    third.ask("/health")
                    assert third.answer().status == 200
                    assert receive_all(other) == b""


def test_drain_sends_clients_away_and_lets_streams_end(serve: Serve) -> None:
    gate = asyncio.Event()
    server = serve(FakeDataPlane(lambda _: [[delta(0, "a")], gate, [delta(0, "b", "stop")]]))
    with Http2Client(server.port) as client:
        client.ask(PATH, 1, STREAM)
        client.read_until(lambda: b'"a"' in client.on(1).body)

        async def drain() -> None:
            server.settings.drain.begin()
            server.server.drain()

        server.do(drain())
        client.ask(PATH, 3, TEXT)  # it does not know yet
        assert (client.answer(3).status, client.answer(3).code) == (503, "not_ready")
        client.read_until(lambda: client.left is not None and client.left[0] == 3)
        server.do(_set(gate))
        assert client.answer(1).body.endswith(b"data: [DONE]\n\n")
        client.read_all()
    wait_until(lambda: server.server.connections == 0)


def test_the_last_answer_arrives_although_its_reader_sends_on(serve: Serve) -> None:
    """As all do that tell how much they have read: a reset would take away what is still on its way."""
    server = serve(FakeDataPlane(lambda _: [[delta(0, "x" * 300_000, "stop")]]))
    with Http2Client(server.port, {Setting.INITIAL_WINDOW_SIZE: 1 << 20}, connect(server.port, 4096)) as client:
        client.send(frames.window_update(0, 1 << 20))
        client.ask(PATH, 1, TEXT)
        client.send(frames.go_away(0, Http2ErrorCode.NO_ERROR))

        def is_complete() -> bool:
            with contextlib.suppress(ConnectionError):
                client.send(frames.window_update(0, 1))
            return client.on(1).ended

        client.read_until(is_complete)
        client.read_all()
    wait_until(lambda: server.server.connections == 0)


def test_stop_waits_for_streams_and_cuts_off_what_does_not_end(serve: Serve) -> None:
    gate = asyncio.Event()
    dataplane = FakeDataPlane(
        lambda request: [
            [delta(0, "a")],
            gate if len(dataplane.generations) < 1 else asyncio.Event(),
            [delta(0, "b", "stop")],
        ]
    )
    server = serve(dataplane)
    with Http2Client(server.port) as ending, Http2Client(server.port) as hanging:
        for client in (ending, hanging):
            client.ask(PATH, 1, STREAM)
            client.read_until(lambda client=client: b'"a"' in client.on(1).body)
        server.do(_set(gate))

        async def stop() -> None:
            await server.server.stop(0.3)

        server.do(stop())
        assert ending.answer(1).body.endswith(b"data: [DONE]\n\n")
        with contextlib.suppress(AssertionError):
            hanging.answer(1)
        assert b"[DONE]" not in hanging.on(1).body
    assert all(generation.closed.is_set() for generation in dataplane.generations)
    assert server.server.connections == 0
