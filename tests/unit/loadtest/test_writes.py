"""Requests go to the kernel at once, and whole."""

from __future__ import annotations

import asyncio
import os
import random

import pytest
import uvloop

from penstock.loadtest.clients import http1
from penstock.loadtest.clients.http1 import ConnectionLostError, ConnectionPool
from unit.loadtest.clients.wires import whole


@pytest.mark.parametrize("size", [10, 20_000_000])
def test_requests_of_any_size_arrive_whole(size: int) -> None:
    request = random.Random(1).randbytes(size)
    arrived = b""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal arrived
        await asyncio.sleep(0.02)  # meanwhile the kernel's buffers fill up
        arrived = await reader.readexactly(size)
        writer.write(whole(b"got it"))

    async def main() -> bytes:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        pool = ConnectionPool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        response = await pool.exchange(request)
        pool.close()
        server.close()
        return response.body

    assert uvloop.run(main()) == b"got it"
    assert arrived == request


def test_many_at_once_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is with the kernel before the next one is made: uvloop's transports would write them all in the end."""
    order: list[str] = []
    write = os.write

    def noted(descriptor: int, data: bytes) -> int:
        order.append(data.decode())
        return write(descriptor, data)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(whole(b""))

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        pool = ConnectionPool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        connections = [await pool._connect() for _ in range(3)]
        monkeypatch.setattr(http1.os, "write", noted)

        async def ask(number: int) -> None:
            order.append(f"made {number}")
            await connections[number].exchange(b"%d" % number, 0.0)

        await asyncio.gather(*map(ask, range(3)))
        for connection in connections:
            connection.close()
        server.close()

    uvloop.run(main())
    assert order == ["made 0", "0", "made 1", "1", "made 2", "2"]


def test_nothing_is_written_to_what_is_being_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The descriptor may be another file's by then."""

    async def main() -> None:
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
        pool = ConnectionPool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        connection = await pool._connect()
        connection.usable = True
        connection._transport.close()  # type: ignore[union-attr]
        monkeypatch.setattr(http1.os, "write", lambda *_: pytest.fail("it was written to"))
        with pytest.raises(ConnectionLostError):
            await connection.exchange(b"x", 0.0)
        server.close()

    uvloop.run(main())
