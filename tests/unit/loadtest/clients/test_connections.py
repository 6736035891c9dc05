"""Connections to a server that does what servers do: keep them, close them, say nothing, break off."""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import subprocess
from pathlib import Path

import msgspec
import pytest

from penstock.loadtest.clients import http1
from penstock.loadtest.clients.base import ClientOptions
from penstock.loadtest.clients.http1 import Address
from penstock.loadtest.clients.openai import CompletionsClient
from penstock.loadtest.errors import CONNECT, MALFORMED, TIMEOUT, TRUNCATED, LoadTestError
from unit.loadtest.clients.wires import CALL, OPTIONS, RawServer, chunk, chunked, event, raw_server, whole

STREAM = [
    event(choices=[{"delta": {"content": "a"}}]),
    event(choices=[{"delta": {}, "finish_reason": "stop"}]),
    b"data: [DONE]\n\n",
]
REPLY = chunked(*STREAM)


def client_of(server: RawServer | str, **options: object) -> CompletionsClient:
    url = server if isinstance(server, str) else server.url
    return CompletionsClient(msgspec.structs.replace(OPTIONS, url=url, **options), chat=True)


async def close_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    raise ConnectionError


async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raise ConnectionError


async def silence(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


async def test_a_connection_is_used_again() -> None:
    async with raw_server(REPLY, REPLY, REPLY) as server:
        client = client_of(server)
        answers = [await client.send(CALL) for _ in range(3)]
        await client.close()
    assert [answer.error for answer in answers] == ["", "", ""]
    assert server.connections == 1
    assert answers[0].connect > 0
    assert [answer.connect for answer in answers[1:]] == [0, 0]
    assert b"\r\nConnection:" not in server.requests[0]


async def test_requests_at_a_time_have_connections_of_their_own() -> None:
    async with raw_server(REPLY, REPLY, REPLY) as server:
        client = client_of(server)
        answers = await asyncio.gather(*(client.send(CALL) for _ in range(3)))
        await client.close()
    assert [answer.error for answer in answers] == ["", "", ""]
    assert server.connections == 3


async def test_without_keep_alive_each_request_has_a_connection() -> None:
    async with raw_server(REPLY, REPLY) as server:
        client = client_of(server, keep_alive=False)
        answers = [await client.send(CALL) for _ in range(2)]
    assert [answer.error for answer in answers] == ["", ""]
    assert server.connections == 2
    assert b"\r\nConnection: close\r\n" in server.requests[0]


async def test_a_server_that_closes_after_each_answer() -> None:
    reply = REPLY.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
    async with raw_server(reply, reply) as server:
        client = client_of(server)
        answers = [await client.send(CALL) for _ in range(2)]
    assert [answer.error for answer in answers] == ["", ""]
    assert server.connections == 2


@pytest.mark.parametrize("ending", [close_at_once, reset])
async def test_a_connection_gone_stale_is_no_failure(ending: object) -> None:
    async with raw_server(REPLY, ending, REPLY) as server:  # type: ignore[arg-type]
        client = client_of(server)
        answers = [await client.send(CALL) for _ in range(2)]
    assert [answer.error for answer in answers] == ["", ""]
    assert server.connections == 2
    assert answers[1].connect > 0


async def test_a_server_that_gives_up_a_request_late_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "_STALE_SECONDS", -1.0)
    async with raw_server(REPLY, close_at_once, REPLY) as server:
        client = client_of(server)
        answers = [await client.send(CALL) for _ in range(2)]
    assert [answer.error for answer in answers] == ["", CONNECT]


@pytest.mark.parametrize("ending", [close_at_once, reset])
async def test_a_new_connection_that_is_lost_without_an_answer(ending: object) -> None:
    async with raw_server(ending, REPLY) as server:  # type: ignore[arg-type]
        answer = await client_of(server).send(CALL)
    assert answer.error == CONNECT
    assert server.connections == 1


async def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        answer = await client_of(f"http://127.0.0.1:{taken.getsockname()[1]}").send(CALL)
    assert answer.error == CONNECT
    assert answer.detail
    assert answer.ended >= answer.sent


async def test_an_answer_that_breaks_off() -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(REPLY[:-9])
        raise ConnectionError

    async with raw_server(half, REPLY, half) as server:
        client = client_of(server)
        answers = [await client.send(CALL) for _ in range(3)]
    assert [answer.error for answer in answers] == [TRUNCATED, "", TRUNCATED], "on a connection that was kept, too"


async def test_an_answer_that_is_no_http_is_malformed_and_quoted() -> None:
    async with raw_server(b"SSH-2.0-OpenSSH_9.6\r\n") as server:
        answer = await client_of(server).send(CALL)
    assert answer.error == MALFORMED
    assert "SSH" in answer.detail


async def test_https_to_a_server_of_http() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(whole(b"", status="400 Bad Request"))
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as listening:
        answer = await client_of(f"https://127.0.0.1:{listening.sockets[0].getsockname()[1]}").send(CALL)
    assert answer.error == CONNECT


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a self-signed certificate for localhost, in one file."""
    path = tmp_path_factory.mktemp("tls") / "server.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(path), "-out", str(path)]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    return path


async def test_certificates_are_checked_unless_told_not_to(certificate: Path) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    server = RawServer(REPLY, REPLY)
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context) as listening:
        url = f"https://localhost:{listening.sockets[0].getsockname()[1]}"
        refused = await client_of(url).send(CALL)
        client = client_of(url, verify_tls=False)
        answers = [await client.send(CALL) for _ in range(2)]
        await client.close()
    assert refused.error == CONNECT
    assert "certificate" in refused.detail
    assert [answer.error for answer in answers] == ["", ""]
    assert [len(answer.arrivals) for answer in answers] == [1, 1]


async def test_a_server_that_says_nothing() -> None:
    async with raw_server(silence) as server:
        answer = await client_of(server, timeout=0.05).send(CALL)
        assert answer.error == TIMEOUT
        await asyncio.wait_for(server.gone.wait(), 20)


async def test_a_stream_that_stops_is_a_timeout() -> None:
    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(REPLY[:-9])
        await reader.read()

    async with raw_server(half) as server:
        answer = await client_of(server, timeout=0.1).send(CALL)
    assert answer.error == TIMEOUT


async def test_cancelling_disconnects() -> None:
    async with raw_server(silence) as server:
        sending = asyncio.create_task(client_of(server).send(CALL))
        while not server.requests:
            await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        await asyncio.wait_for(server.gone.wait(), 20)


async def test_what_comes_unasked_ends_an_idle_connection() -> None:
    async def and_more(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(REPLY)
        await writer.drain()
        await more.wait()
        writer.write(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
        await reader.read()

    more = asyncio.Event()
    async with raw_server(and_more, REPLY) as server:
        client = client_of(server)
        first = await client.send(CALL)
        more.set()
        await asyncio.wait_for(server.gone.wait(), 20)
        second = await client.send(CALL)
    assert (first.error, second.error) == ("", "")
    assert server.connections == 2


async def test_an_answer_before_the_request_was_all_sent() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(b"too long", status="413 Content Too Large"))
        await writer.drain()
        await reader.read()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as listening:
        client = client_of(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
        answer = await client.send(msgspec.structs.replace(CALL, prompt="x" * (1 << 24)))
    assert answer.error == "http_413"
    assert answer.detail == "too long"


async def test_reads_that_came_apart_are_told_apart() -> None:
    async def slowly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(REPLY[: REPLY.index(chunk(STREAM[0]))] + chunk(STREAM[0]))
        await first.wait()
        writer.write(REPLY[REPLY.index(chunk(STREAM[1])) :])

    first = asyncio.Event()
    async with raw_server(slowly) as server:
        sending = asyncio.create_task(client_of(server).send(CALL))
        while not server.requests:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        first.set()
        answer = await sending
    assert answer.error == ""
    assert answer.sent < answer.arrivals[0] < answer.ended
    assert answer.reads == 2


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host",
        "http://",
        "http://host:port",
        "http://host:99999",
        "http://host:0",
        "http://[::1",
        "http://user:secret@host",
        "http://host/path?query=1",
        "http://host/a path",
        "http://host/ä",
        "http://a..b",
    ],
)
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(LoadTestError, match="url") as raised:
        Address(url)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("localhost:8000", ("localhost", 8000, "", False)),
        ("http://h", ("h", 80, "", False)),
        ("https://h/base/", ("h", 443, "/base", True)),
        ("http://[::1]:9", ("::1", 9, "", False)),
    ],
)
def test_an_address_is_host_port_path_and_tls(url: str, expected: tuple[object, ...]) -> None:
    address = Address(url)
    assert (address.host, address.port, address.path, address.tls) == expected


async def test_the_path_of_the_address_and_the_headers_are_sent() -> None:
    async with raw_server(REPLY) as server:
        options = {"api_key": "k", "headers": {"X-Tenant": "t", "accept": "*/*"}}
        await client_of(server.url + "/base/", **options).send(CALL)
    head = server.requests[0].partition(b"\r\n\r\n")[0].decode()
    assert head.startswith("POST /base/v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:")
    for line in ("Authorization: Bearer k", "X-Tenant: t", "accept: */*", "Content-Type: application/json"):
        assert line in head.split("\r\n")
    assert "Accept:" not in head


def test_headers_that_are_the_clients_own() -> None:
    with pytest.raises(LoadTestError, match="Content-Length"):
        CompletionsClient(ClientOptions(url="http://h", headers={"Content-Length": "3"}), chat=True)
