"""Connections that close, of clients that have not taken everything yet."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from penstock.gateway.transports.http.http1 import Http1Connection
from penstock.gateway.transports.http.server import HttpServer, ServerSettings
from penstock.gateway.transports.sockets.connection import untaken_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the system does not tell what a client has taken")


class TlsTransport(asyncio.Transport):
    """Says, as those of TLS do, that it has passed on everything."""

    def __init__(self, own: socket.socket) -> None:
        super().__init__({"socket": own})
        self._closing = self.aborted = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        own, _ = server.accept()
        with own:
            own.setblocking(False)
            yield own, client


async def test_a_closing_connection_waits_for_what_the_client_has_not_taken(
    sockets: tuple[socket.socket, socket.socket],
) -> None:
    own, client = sockets

    async def app(*_: Any) -> None: ...

    transport = TlsTransport(own)
    connection = Http1Connection(HttpServer(app, ServerSettings())._shared)
    connection.connection_made(transport)
    written = 0
    with suppress(BlockingIOError):
        while True:
            written += own.send(bytes(1 << 16))
    connection._close()
    now = time.monotonic()
    for seconds in (2, 4, 30, 59):
        connection.tick(now + seconds)
        assert not transport.aborted
    client.settimeout(20)
    while written:
        written -= len(client.recv(1 << 20))
    async with asyncio.timeout(20):
        while untaken_bytes(transport):
            await asyncio.sleep(0)
    connection.tick(now + 60)
    assert transport.aborted, "its client has everything, and does not agree to the end"
