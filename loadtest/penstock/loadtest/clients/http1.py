"""HTTP/1.1 as a load client wants it: whole requests as bytes, answers as time-stamped reads.

While an answer comes in, a read costs the time of day and httptools' framing, half a microsecond; events and JSON are
taken apart once it is complete. So the client's own work is small, and hardly any lies between two tokens of a stream.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from contextlib import suppress
from time import perf_counter
from typing import cast
from urllib.parse import urlsplit

from penstock.loadtest.clients.base import ClientOptions
from penstock.loadtest.clients.response import HttpResponse, MalformedError
from penstock.loadtest.errors import LoadTestError

_OURS = frozenset({"connection", "content-length", "expect", "transfer-encoding"})


def head(pool: ConnectionPool, options: ClientOptions, method: str, path: str, **fields: str) -> bytes:
    """Request line and headers, without the empty line. `fields`: headers with _ for -; the options' own go before
    them. Raises LoadTestError for headers that are this client's business."""
    headers = {"Host": pool.authority} | {name.replace("_", "-").title(): value for name, value in fields.items()}
    if options.api_key is not None:
        headers["Authorization"] = f"Bearer {options.api_key}"
    if not options.keep_alive:
        headers["Connection"] = "close"
    for name, value in options.headers.items():
        if name.lower() in _OURS:
            raise LoadTestError(f"header: {name} is set by the client itself")
        headers = {known: kept for known, kept in headers.items() if known.lower() != name.lower()} | {name: value}
    lines = [f"{method} {pool.path}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode()


_STALE_SECONDS = 1.0
"""A connection that was kept open and is lost so soon after a request had most likely been closed before it."""


class ConnectionLostError(Exception):
    """The server closed the connection. `answer` is what had come, None if that was nothing."""

    def __init__(self, answer: HttpResponse | None) -> None:
        super().__init__("the connection was closed")
        self.answer = answer


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._socket = -1
        """The descriptor, where what is written to it is sent as it is."""
        self._response: HttpResponse | None = None
        self._done: asyncio.Future[HttpResponse] | None = None
        self.usable = False
        """Open, and not announced to be closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not registered as such
        self.usable = True
        if self._transport.get_extra_info("sslcontext") is None:
            plain = self._transport.get_extra_info("socket")
            self._socket = -1 if plain is None else plain.fileno()

    async def exchange(self, request: bytes, connect: float) -> HttpResponse:
        """Sends a request and waits for its whole answer. Raises ConnectionLostError, MalformedError."""
        if self._transport is None or not self.usable:
            raise ConnectionLostError(None)
        self._done = asyncio.get_running_loop().create_future()
        self._response = HttpResponse(perf_counter(), connect)
        self._write(self._transport, request)
        return await self._done

    def _write(self, transport: asyncio.Transport, request: bytes) -> None:
        """To the kernel at once: uvloop's transport keeps it until everybody else's turn is over."""
        sent = 0
        if self._socket >= 0 and not transport.is_closing() and not transport.get_write_buffer_size():
            with suppress(OSError):  # it is full, or lost: the transport waits, or tells
                sent = os.write(self._socket, request)
        if sent < len(request):
            transport.write(request[sent:])

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        response = self._response
        if response is None:  # nobody has asked for anything
            self.close()
            return
        try:
            response.feed(data, now)
        except MalformedError as error:
            self._fail(response, error)
        else:
            if response.complete:
                self._finish(response)

    def _finish(self, response: HttpResponse) -> None:
        self._response = None
        response.release()
        unsent = self._transport is not None and self._transport.get_write_buffer_size() > 0
        if response.surplus or response.closes or unsent:
            self.close()
        if self._done is not None and not self._done.done():
            self._done.set_result(response)

    def _fail(self, response: HttpResponse, error: Exception) -> None:
        self._response = None
        response.release()
        self.close()
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        response = self._response
        if response is None:
            return
        if exc is None and response.until_end:
            self._finish(response)
        else:
            self._fail(response, ConnectionLostError(response if response.times else None))

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.abort()


class ConnectionPool:
    """Connections to one server, each used by one request at a time."""

    def __init__(self, url: str, *, keep_alive: bool = True, verify_tls: bool = True) -> None:
        """Raises LoadTestError for what is no address."""
        address = Address(url)
        self.path = address.path
        self.authority = address.authority
        self._host, self._port = address.host, address.port
        self._resolved: tuple[str, int] | None = None
        """Where the first connection went: names are looked up once."""
        self._keep_alive = keep_alive
        self._tls = _tls(verify_tls) if address.tls else None
        self._idle: list[Connection] = []

    async def exchange(self, request: bytes) -> HttpResponse:
        """Raises OSError when there is no connection to be had, ConnectionLostError when it is lost, MalformedError.

        A connection that the server has closed in the meantime is no failure: the request goes out on another one.
        """
        while self._idle:
            connection = self._idle.pop()
            if not connection.usable:
                continue
            began = perf_counter()
            try:
                return await self._use(connection, request, 0.0)
            except ConnectionLostError as error:
                if error.answer is not None or perf_counter() - began > _STALE_SECONDS:
                    raise
        began = perf_counter()
        connection = await self._connect()
        return await self._use(connection, request, perf_counter() - began)

    async def _connect(self) -> Connection:
        host, port = self._resolved or (self._host, self._port)
        transport, connection = await asyncio.get_running_loop().create_connection(
            Connection, host, port, ssl=self._tls, server_hostname=self._host if self._tls else None
        )
        peer = transport.get_extra_info("peername")
        if peer and not any(peer[3:]):  # an IPv6 address of one link is none without that link
            self._resolved = peer[0], peer[1]
        return connection

    async def _use(self, connection: Connection, request: bytes, connect: float) -> HttpResponse:
        try:
            answer = await connection.exchange(request, connect)
        except BaseException:
            connection.close()
            raise
        if self._keep_alive and connection.usable:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


class Address:
    """The server's address. Raises LoadTestError for what is none, and for what a load test cannot use of it."""

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url if "//" in url else f"http://{url}")
            host, port = parts.hostname, parts.port
            (host or "").encode("idna")
        except ValueError as error:
            raise LoadTestError(f"url: {url!r} is not an address: {error}") from None
        if parts.scheme not in ("http", "https") or not host or port == 0:
            raise LoadTestError(f"url: {url!r} is not an http or https address")
        if parts.username is not None or parts.query or parts.fragment:
            raise LoadTestError("url: it may have a host, a port and a path, nothing else (--api-key, --header)")
        if not parts.path.isascii() or " " in parts.path or not parts.path.isprintable():
            raise LoadTestError(f"url: the path of {url!r} is not percent-encoded")
        self.tls = parts.scheme == "https"
        self.host = host
        self.port = port or (443 if self.tls else 80)
        self.path = parts.path.rstrip("/")
        self.authority = parts.netloc


def _tls(verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["http/1.1"])
    return context
