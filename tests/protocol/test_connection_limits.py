"""Clients that send too much, too slowly or the wrong thing, and clients that do not read."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import select
import socket
from collections.abc import Iterable

import pytest

from penstock.gateway.models.language.dataplane import GenerateRequest
from penstock.gateway.transports.http.stream import ConnectionLimits
from protocol.conftest import Serve, ServerThread
from protocol.fake_dataplane import FakeDataPlane, Step, delta
from protocol.raw_http import connect, post, read_slowly, receive_all, receive_until, status
from support.keys import api_keys
from support.server import wait_until

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"
TEXT = {"model": "tiny", "prompt": "hi"}


def exchanged(server: ServerThread, data: bytes) -> bytes:
    with connect(server.port) as client:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all was sent
            client.sendall(data)
        return receive_all(client)


def assert_refused(response: bytes, expected: int) -> None:
    assert status(response) == expected
    head, _, body = response.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("99 more headers", GET + b"A: b\r\n" * 98 + b"Connection: close\r\n\r\n", 200),
        ("100 more headers", GET + b"A: b\r\n" * 99 + b"Connection: close\r\n\r\n", 431),
        ("20000 headers", GET + b"A: b\r\n" * 20_000 + b"\r\n", 431),
        ("60 KiB header", GET + b"A: " + b"b" * 60_000 + b"\r\nConnection: close\r\n\r\n", 200),
        ("64 KiB header", GET + b"A: " + b"b" * 65_536 + b"\r\n\r\n", 431),
        ("8 MiB header", GET + b"A: " + b"b" * (8 << 20) + b"\r\n\r\n", 431),
        ("8 MiB header name", GET + b"a" * (8 << 20) + b": b\r\n\r\n", 431),
        ("7 KiB URI", b"GET /health?" + b"x" * 7000 + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 200),
        ("9 KiB URI", b"GET /health?" + b"x" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
        ("8 MiB URI", b"GET /" + b"x" * (8 << 20) + b" HTTP/1.1\r\n\r\n", 414),
        ("empty lines", b"\r\n" * 100_000, 431),
        ("no HTTP", b"hello\r\n\r\n", 400),
        ("two lengths", GET + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        ("negative length", GET + b"Content-Length: -1\r\n\r\n", 400),
        ("length and chunks", GET + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        ("no path", b"GET http://evil HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("CONNECT", b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("non-ASCII path", "GET /é HTTP/1.1\r\nHost: x\r\n\r\n".encode(), 400),
        ("bad chunk", GET + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
    ],
)  # fmt: skip
def test_broken_or_oversized_head(serve: Serve, name: str, data: bytes, expected: int) -> None:
    server = serve()
    response = exchanged(server, data)
    if expected == 200:
        assert status(response) == 200
    else:
        assert_refused(response, expected)
    assert status(exchanged(server, GET + b"Connection: close\r\n\r\n")) == 200


def chunked(*chunks: bytes, trailer: bytes = b"") -> bytes:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    )
    return head + b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in chunks) + b"0\r\n" + trailer + b"\r\n"


BODY = json.dumps(TEXT).encode()


def test_chunked_bodies(serve: Serve) -> None:
    server = serve()
    assert status(exchanged(server, chunked(*[bytes([each]) for each in BODY]))) == 200
    assert_refused(exchanged(server, chunked(BODY, *[b" "] * 65_536)), 400)
    assert status(exchanged(serve(max_body_bytes=100), chunked(BODY, b" " * 100))) == 413


def test_trailers_are_no_headers(serve: Serve) -> None:
    server = serve(keys=api_keys({"red": "key"}))
    assert status(exchanged(server, chunked(BODY, trailer=b"Authorization: Bearer key\r\n"))) == 401
    assert_refused(exchanged(serve(), chunked(BODY, trailer=b"A: b\r\n" * 200)), 431)


def test_upgrade_is_answered_as_plain_http(serve: Serve) -> None:
    data = GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x\r\n\r\n"
    assert status(exchanged(serve(), data)) == 200


@pytest.mark.parametrize("framing", ["length", "chunks", "pieces"])
def test_the_body_of_a_request_for_an_upgrade_is_its_body(serve: Serve, framing: str) -> None:
    """As Java's HttpClient and `curl --http2` ask for HTTP/2 without TLS."""
    asked = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk")
    sent = post(TEXT, "/v1/completions", *asked)
    if framing == "chunks":
        lines = b"".join(line + b"\r\n" for line in asked)
        sent = chunked(BODY[:5], BODY[5:]).replace(b"Connection: close\r\n", lines)
    with connect(serve().port) as client:
        for start in range(0, len(sent), 20 if framing == "pieces" else len(sent)):
            client.sendall(sent[start:][: 20 if framing == "pieces" else None])
        answer = receive_all(client)
    assert status(answer) == 200
    assert b"one two three" in answer


@pytest.mark.parametrize("stream", [True, False])
def test_answers_to_http_1_0_have_no_chunks_and_end_with_the_connection(serve: Serve, stream: bool) -> None:
    data = post({**TEXT, "stream": stream}, "/v1/completions", b"Connection: keep-alive", b"Expect: 100-continue")
    answer = exchanged(serve(), data.replace(b"HTTP/1.1", b"HTTP/1.0"))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert status(answer) == 200
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert (b"content-length: %d" % len(body) in head) is not stream
    if stream:
        events = body.split(b"\n\n")
        assert all(event.startswith(b"data: ") for event in events[:-1])
        assert events[-2:] == [b"data: [DONE]", b""]
    else:
        assert json.loads(body)["choices"][0]["text"] == "one two three"


def test_http_1_0_with_http_client_of_python(serve: Serve) -> None:
    client = http.client.HTTPConnection("127.0.0.1", serve().port, timeout=20)
    client._http_vsn, client._http_vsn_str = 10, "HTTP/1.0"  # type: ignore[attr-defined]
    client.request("POST", "/v1/completions", json.dumps({**TEXT, "stream": True}))
    assert client.getresponse().read().endswith(b"data: [DONE]\n\n")


def test_keep_alive_serves_one_request_after_another(serve: Serve) -> None:
    server = serve()
    with connect(server.port) as client:
        for _ in range(3):
            client.sendall(post(TEXT))
            assert status(receive_until(client, b"one two three")) == 200
            client.sendall(post({**TEXT, "stream": True}))
            assert status(receive_until(client, b"0\r\n\r\n")) == 200
        assert server.server.connections == 1


def test_a_refused_body_is_read_and_dropped_so_that_the_answer_arrives(serve: Serve) -> None:
    server = serve(max_body_bytes=100)
    with connect(server.port) as client:
        client.sendall(post(b" " * (4 << 20)))
        assert b"payload_too_large" in receive_until(client, b"}}")
        client.sendall(GET + b"\r\n")
        assert status(receive_until(client, b"}")) == 200


def test_the_answer_to_a_refused_body_arrives_also_where_the_connection_ends_with_it(serve: Serve) -> None:
    """Python's urllib asks for that, and nginx in front; a reset would take the answer away."""
    server = serve(max_body_bytes=100)
    with connect(server.port) as client:
        client.sendall(post(b" " * (4 << 20), "/v1/completions", b"Connection: close"))
        assert_refused(receive_all(client), 413)
        wait_until(lambda: server.server.connections == 0)


def test_after_a_refused_body_a_connection_is_idle(serve: Serve) -> None:
    head, end, body = post(b" " * 200).partition(b"\r\n\r\n")
    with connect(serve(limits=SLOW, max_body_bytes=100).port) as client:
        client.sendall(head + end)
        assert b"payload_too_large" in receive_until(client, b"}}")
        client.sendall(body)
        assert receive_all(client) == b""


def test_an_expected_continue_is_not_sent_for_a_body_over_the_limit(serve: Serve) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 101\r\nExpect: 100-continue\r\n\r\n"
    with connect(serve(max_body_bytes=100).port) as client:
        client.sendall(head)
        assert status(receive_until(client, b"}}")) == 413


def test_an_expected_continue_is_sent_before_the_body_and_the_answer_after_it(serve: Serve) -> None:
    """curl asks for it before any body of a megabyte or more."""
    head, _, body = post(TEXT, "/v1/completions", b"Expect: 100-continue").partition(b"\r\n\r\n")
    with connect(serve(FakeDataPlane(lambda _: [[delta(0, "one", "stop")]])).port) as client:
        client.sendall(head + b"\r\n\r\n")
        assert receive_until(client, b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert status(receive_until(client, b'"one"')) == 200


SLOW = ConnectionLimits(header_timeout=0.3, body_idle_timeout=0.3, keep_alive_timeout=0.3)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("nothing at all", b""),
        ("half a request line", b"GET /hea"),
        ("half the headers", GET),
        ("an empty line first", b"\r\n"),
        ("no body", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 10\r\n\r\n"),
        ("half a body", b"POST /v1/completions HTTP/1.1\r\nContent-Length: 10\r\n\r\n12345"),
        ("half a chunk", b"POST /v1/completions HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n12"),
    ],
)
def test_a_request_that_does_not_arrive_is_given_up(serve: Serve, name: str, data: bytes) -> None:
    server = serve(limits=SLOW)
    with connect(server.port) as client:
        client.sendall(data)
        assert_refused(receive_all(client), 408)
    assert server.do(server.settings.drain.wait_idle(20))


def test_header_lines_that_trickle_meet_an_absolute_deadline(serve: Serve) -> None:
    with connect(serve(limits=SLOW).port) as client:
        client.sendall(GET)
        assert_refused(answer_to_drops(client, b"A: b\r\n"), 408)


def answer_to_drops(client: socket.socket, drop: bytes) -> bytes:
    """All that comes for one of them each twentieth of a second, until something does."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # closed between two drops
        while not select.select([client], [], [], 0.05)[0]:
            client.sendall(drop)
    return receive_all(client)


def test_the_deadline_holds_for_later_requests_too(serve: Serve) -> None:
    with connect(serve(limits=ConnectionLimits(header_timeout=1)).port) as client:
        client.sendall(GET + b"\r\n")
        receive_until(client, b"}")
        client.sendall(GET)
        assert_refused(receive_all(client), 408)


def test_idle_connections_are_closed(serve: Serve) -> None:
    with connect(serve(limits=SLOW).port) as client:
        client.sendall(GET + b"\r\n")
        assert receive_all(client).endswith(b"}")


def test_a_steady_slow_body_is_served(serve: Serve) -> None:
    gaps = 14
    limits = ConnectionLimits(header_timeout=1.0, body_idle_timeout=1.0, body_rate=1.0)
    with connect(serve(limits=limits).port) as client:
        client.settimeout(0.1)
        head, _, body = post(TEXT).partition(b"\r\n\r\n")
        client.sendall(head + b"\r\n\r\n")
        for at in range(gaps):
            with pytest.raises(TimeoutError):
                client.recv(1)
            client.sendall(body[at : at + 1])
        client.settimeout(10)
        client.sendall(body[gaps:])
        assert status(receive_until(client, b"one two three")) == 200


@pytest.mark.parametrize("limits", [{"body_rate": 1e6}, {"body_rate": 1e-3, "body_timeout": 0.8}])
def test_a_body_that_drips_is_given_up(serve: Serve, limits: dict[str, float]) -> None:
    """It is never idle, but too slow, or takes too long in all."""
    with connect(serve(limits=ConnectionLimits(body_idle_timeout=0.3, **limits)).port) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n")
        assert_refused(answer_to_drops(client, b"x"), 408)


def test_connections_over_the_limit_are_turned_away(serve: Serve) -> None:
    dataplane = FakeDataPlane(lambda _: [asyncio.Event()])
    server = serve(dataplane, limits=ConnectionLimits(max_connections=2))
    with connect(server.port) as first, connect(server.port) as second:
        for number, client in enumerate((first, second), 1):
            client.sendall(post(TEXT))
            wait_until(lambda wanted=number: len(dataplane.generations) == wanted)
        with connect(server.port) as third:
            assert_refused(receive_all(third), 503)
    with connect(server.port) as later:
        later.sendall(GET + b"Connection: close\r\n\r\n")
        assert status(receive_all(later)) in (200, 503)


def test_the_connection_that_is_idle_longest_makes_room(serve: Serve) -> None:
    server = serve(limits=ConnectionLimits(max_connections=2))
    with connect(server.port) as first, connect(server.port) as second:
        for client in (first, second):
            client.sendall(GET + b"\r\n")
            assert status(receive_until(client, b"}")) == 200
        with connect(server.port) as third:
            third.sendall(GET + b"\r\n")
            assert status(receive_until(third, b"}")) == 200
            assert receive_all(first) == b"", "closed"
            second.sendall(GET + b"\r\n")
            assert status(receive_until(second, b"}")) == 200


def flood(request: GenerateRequest) -> Iterable[Step]:
    while True:
        yield [delta(0, "x" * 4096)]


def test_a_reader_that_stops_reading_is_cut_off(serve: Serve) -> None:
    dataplane = FakeDataPlane(flood)
    server = serve(dataplane, limits=ConnectionLimits(send_timeout=0.3))
    with connect(server.port, receive_buffer=4096) as client:
        client.sendall(post({**TEXT, "stream": True}))
        receive_until(client, b"200 OK")
        server.do(dataplane.generating.wait())
        server.do(dataplane.generations[0].closed.wait())
        assert server.do(server.settings.drain.wait_idle(20))
        with pytest.raises(AssertionError):
            receive_until(client, b"[DONE]")


STREAMED = post({**TEXT, "stream": True}, "/v1/completions", b"Connection: close")


def test_a_slow_but_steady_reader_is_not_cut_off(serve: Serve) -> None:
    dataplane = FakeDataPlane(lambda _: [[delta(0, "x" * (3 << 20), "stop")]])
    server = serve(dataplane, limits=ConnectionLimits(send_timeout=1), tick=1.0)
    with connect(server.port, receive_buffer=4096) as client:
        client.sendall(STREAMED)
        assert read_slowly(client).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_steady_reader_is_not_judged_by_an_earlier_answer(serve: Serve) -> None:
    texts = iter(["a", "x" * (3 << 20)])
    dataplane = FakeDataPlane(lambda _: [[delta(0, next(texts), "stop")]])
    server = serve(dataplane, limits=ConnectionLimits(send_timeout=1), tick=1.0)
    with connect(server.port, receive_buffer=4096) as client:
        client.sendall(post(TEXT))
        receive_until(client, b'"a"')
        client.sendall(STREAMED)
        assert read_slowly(client).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_a_client_that_pipelines_and_leaves_is_noticed(serve: Serve) -> None:
    dataplane = FakeDataPlane(lambda _: [[delta(0, "a")], asyncio.Event()])
    server = serve(dataplane)
    with connect(server.port) as client:
        client.sendall(post({**TEXT, "stream": True}) + post(TEXT) * 3)
        receive_until(client, b'"a"')
    server.do(dataplane.generations[0].closed.wait())
    assert len(dataplane.requests) == 1


def test_pipelined_requests_are_dropped_and_the_connection_closed(serve: Serve) -> None:
    dataplane = FakeDataPlane()
    server = serve(dataplane)
    with connect(server.port) as client:
        client.sendall(post(TEXT) + post(TEXT))
        assert receive_all(client).count(b"HTTP/1.1 200") == 1
    assert len(dataplane.requests) == 1
