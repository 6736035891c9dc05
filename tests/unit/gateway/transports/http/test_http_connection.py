"""A client's end of HTTP/1.1, against servers that write what they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import pytest

from penstock.gateway.configuration.upstream_settings import base_url
from penstock.gateway.transports.http.http_connection import BrokenAnswer, CannotConnect, ConnectionPool, HttpConnection

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Script:
    """Answers each request with the next text; "" closes the connection instead, as does the end of the script."""

    def __init__(self, answers: Sequence[bytes]) -> None:
        self.answers = list(answers)
        self.connections = 0
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while self.answers:
                await reader.readuntil(b"\r\n\r\n")
                answer = self.answers.pop(0)
                if not answer:
                    break
                writer.write(answer)
                await writer.drain()
        writer.close()


@asynccontextmanager
async def scripted(*answers: bytes) -> AsyncIterator[tuple[Script, ConnectionPool]]:
    script = Script(answers)
    server = await asyncio.start_server(script.serve, "127.0.0.1", 0)
    script.port = server.sockets[0].getsockname()[1]
    pool = ConnectionPool(base_url(f"http://127.0.0.1:{script.port}"), None, 5.0)
    try:
        yield script, pool
    finally:
        pool.close()
        server.close()


async def read(pool: ConnectionPool) -> tuple[int, bytes]:
    connection = await pool.ask(REQUEST)
    try:
        return connection.status, await connection.read(1 << 20)
    finally:
        pool.give_back(connection)


async def test_a_connection_is_used_again() -> None:
    async with scripted(OK, CHUNKED + b"3\r\nabc\r\n0\r\n\r\n", OK) as (script, pool):
        assert [await read(pool) for _ in range(3)] == [(200, b"ok"), (200, b"abc"), (200, b"ok")]
        assert script.connections == 1


async def test_a_connection_that_was_being_closed_is_replaced() -> None:
    async with scripted(OK, b"", OK) as (script, pool):
        assert await read(pool) == (200, b"ok")
        assert await read(pool) == (200, b"ok")
        assert script.connections == 2


async def test_an_answer_that_breaks_off_is_not_asked_for_again() -> None:
    async with scripted(OK, b"HTTP/1.1 200 OK\r\nx: ", OK) as (script, pool):
        await read(pool)
        script.answers = script.answers[:1]
        with pytest.raises(BrokenAnswer):
            await read(pool)


async def test_a_server_that_closes_late_may_have_had_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.transports.http.http_connection._CLOSING_SECONDS", -1.0)
    async with scripted(OK, b"", OK) as (script, pool):
        await read(pool)
        with pytest.raises(BrokenAnswer):
            await read(pool)
        assert script.answers == [OK]


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
        b"HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n" + OK,
        b"HTTP/1.0 200 OK\r\n\r\nok",
    ],
)
async def test_less_usual_forms_of_an_answer(answer: bytes) -> None:
    async with scripted(answer) as (_, pool):
        assert await read(pool) == (200, b"ok")


@pytest.mark.parametrize(
    "answer",
    [
        b"not HTTP at all\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * (1 << 20),
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * (1 << 18) + b"\r\n",
        CHUNKED + b"1;" + b"e" * (1 << 18) + b"\r\na\r\n",
        CHUNKED + b"1\r\na\r\n0\r\n" + b"x: y\r\n" * (1 << 15),
        CHUNKED + b"5\r\nabc",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ncontent-length: 2000000\r\n\r\n" + b"z" * 2_000_000,
    ],
)
async def test_an_answer_that_is_broken_or_costs_too_much_is_given_up(answer: bytes) -> None:
    async with scripted(answer) as (_, pool):
        with pytest.raises(BrokenAnswer):
            await read(pool)


async def test_a_second_answer_to_one_request_is_nobodys() -> None:
    async with scripted(OK + OK, OK) as (script, pool):
        assert await read(pool) == (200, b"ok")
        assert await read(pool) == (200, b"ok")
        assert script.connections == 2


async def test_the_last_bytes_may_come_after_the_last_word() -> None:
    async with scripted(CHUNKED + b"4\r\nlast\r\n", OK) as (script, pool):
        connection = await pool.ask(REQUEST)
        assert await connection.chunk() == b"last"
        pool.give_back_at_end(connection)
        connection.data_received(b"0\r\n\r\n")
        assert await read(pool) == (200, b"ok")
        assert script.connections == 1


async def test_what_nobody_takes_is_not_read() -> None:
    """The other server has to wait."""
    size = 64 << 20
    async with scripted(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size + bytes(size)) as (_, pool):
        connection = await pool.ask(REQUEST)
        while not connection._paused:
            await asyncio.sleep(0)
        assert connection._size < 2 << 20
        assert sum([len(piece) async for piece in _pieces(connection)]) == size
        pool.give_back(connection)


async def _pieces(connection: HttpConnection) -> AsyncIterator[bytes]:
    while piece := await connection.chunk():
        yield piece


async def test_nobody_there() -> None:
    async with scripted() as (script, pool):
        port = script.port
    pool = ConnectionPool(base_url(f"http://127.0.0.1:{port}"), None, 5.0)
    with pytest.raises(CannotConnect):
        await pool.ask(REQUEST)
