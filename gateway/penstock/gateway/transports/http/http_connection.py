"""A client's end of HTTP/1.1: one request at a time, with bounds on all that an answer may cost."""

from __future__ import annotations

import asyncio
import ssl
from typing import Protocol

import httptools

from penstock.gateway.configuration.upstream_settings import BaseUrl

MAX_FRAMING = 64 << 10
"""Bytes of an answer that are no body, beside one for each byte of body: head, lengths of chunks, trailers."""
_HIGH_WATER = 256 << 10
"""Of a body that nobody has taken: the other server waits from there on."""


class BrokenAnswer(Exception):
    """The connection ended before the answer did, or what came is not HTTP. Nothing of it can be used any more."""


class Sink(Protocol):
    """Takes a body as it comes. Called on the event loop; it must not raise its own error types."""

    def data(self, piece: bytes) -> None: ...

    def ended(self, error: BrokenAnswer | None) -> None:
        """The last call."""


class HttpConnection(asyncio.Protocol):
    """`request`, then `chunk` or `listen` until the body's end; then `reusable` says whether there may be another."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._closed = False
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        """By lower-case name; the last of several."""
        self.began = False
        """Whether a byte of the answer has come."""
        self.complete = False
        self.arrived = self._loop.time()
        """When the newest piece came, of the loop's clock."""
        self._keeps_alive = False
        self._until_close = False
        self._has_head = False
        self._fed = self._taken = 0
        self._pieces: list[bytes] = []
        self._size = 0
        self._paused = False
        self._error: BrokenAnswer | None = None
        self._news: asyncio.Future[None] | None = None
        self._sink: Sink | None = None

    @property
    def closed(self) -> bool:
        return self._closed or self._transport is None or self._transport.is_closing()

    @property
    def reusable(self) -> bool:
        sent = self._transport is not None and not self._transport.get_write_buffer_size()
        return self.complete and self._keeps_alive and sent and not self.closed

    async def request(self, data: bytes) -> None:
        """Sends a whole request, and returns when the answer's head is here. Raises BrokenAnswer."""
        if self._transport is None or self.closed:
            raise BrokenAnswer("the connection is closed")
        self._reset()
        self._transport.write(data)
        while not self._has_head:
            await self._wait()

    async def chunk(self) -> bytes:
        """What has come of the body since the last time; waits for it. Empty at the end. Raises BrokenAnswer."""
        while not self._pieces:
            if self.complete:
                return b""
            await self._wait()
        return self._take()

    async def read(self, limit: int) -> bytes:
        """The rest of the body. Raises BrokenAnswer, also where it is longer than that."""
        pieces: list[bytes] = []
        size = 0
        while piece := await self.chunk():
            pieces.append(piece)
            size += len(piece)
            if size > limit:
                self.close()
                raise BrokenAnswer(f"the answer is longer than {limit} bytes")
        return b"".join(pieces)

    def listen(self, sink: Sink | None) -> None:
        """Pieces go to `sink` at once, and first what is here. None: they are kept again."""
        self._sink = sink
        if sink is None:
            return
        if self._pieces:
            sink.data(self._take())
        if self._sink is sink and (self.complete or self._error is not None):
            self._sink = None
            sink.ended(self._error)

    def close(self) -> None:
        """Whatever is not complete is given up. Idempotent."""
        self._closed = True
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._news = self._loop.create_future()
        try:
            await self._news
        finally:
            self._news = None
        if self._error is not None and not self._pieces:
            raise self._error

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _take(self) -> bytes:
        pieces, self._pieces, self._size = self._pieces, [], 0
        if self._paused and self._transport is not None and not self.closed:
            self._paused = False
            self._transport.resume_reading()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _fail(self, error: BrokenAnswer) -> None:
        if self.complete or self._error is not None:
            return
        self._error = error
        self.close()
        self._tell()
        if self._sink is not None:
            sink, self._sink = self._sink, None
            sink.ended(error)

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        if self._until_close and exc is None:
            self.on_message_complete()
        else:
            self._fail(BrokenAnswer("the connection ended before the answer did"))

    def data_received(self, data: bytes) -> None:
        self.began = True
        self.arrived = self._loop.time()
        self._fed += len(data)
        if self.complete:  # nobody asked for more
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._fail(BrokenAnswer("the answer is not HTTP/1.1"))
            return
        if self._fed - self._taken > MAX_FRAMING + self._taken:
            self._fail(BrokenAnswer("the answer's head or framing is too long"))
        elif self._size > _HIGH_WATER and not self._paused and self._transport is not None and not self.closed:
            self._paused = True
            self._transport.pause_reading()

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:
            self.headers[name.lower()] = value

    def on_message_begin(self) -> None:
        if self.complete:  # a second answer to one request
            self.close()

    def on_headers_complete(self) -> None:
        if self.complete:
            return
        self.status = self._parser.get_status_code()
        if self.status < 200:  # more is to come: 100 Continue, 103 Early Hints
            self.headers = {}
            return
        self._keeps_alive = self._parser.should_keep_alive()
        chunked = b"chunked" in self.headers.get(b"transfer-encoding", b"").lower()
        self._until_close = not chunked and b"content-length" not in self.headers and self.status not in (204, 304)
        self._has_head = True
        self._tell()

    def on_body(self, piece: bytes) -> None:
        if self.complete:
            return
        self._taken += len(piece)
        if self._sink is not None:
            self._sink.data(piece)
            return
        self._pieces.append(piece)
        self._size += len(piece)
        self._tell()

    def on_message_complete(self) -> None:
        if self.status < 200 or self.complete or self._error is not None:
            return
        self.complete = True
        self._tell()
        if self._sink is not None:
            sink, self._sink = self._sink, None
            sink.ended(None)


_IDLE_SECONDS = 4.0
"""uvicorn closes what has been idle for 5: a request must not be on its way then."""
_MOST_IDLE = 256
_LAST_SECONDS = 1.0


class CannotConnect(Exception):
    """No byte of the request has left."""


_CLOSING_SECONDS = 1.0
"""A server that was closing an idle connection shows it at once; later it may have had the request."""


class ConnectionPool:
    def __init__(self, url: BaseUrl, tls: ssl.SSLContext | None, connect_timeout: float) -> None:
        self._url = url
        self._tls = tls
        self._connect_timeout = connect_timeout
        self._idle: list[tuple[HttpConnection, float]] = []
        """With the time since when; the newest last."""

    async def ask(self, request: bytes) -> HttpConnection:
        """A connection on which the answer's head has come: to be given back. A request that met a connection which
        the other server was closing is sent again on a new one. Raises CannotConnect, BrokenAnswer."""
        connection = self._take()
        if connection is not None:
            sent = asyncio.get_running_loop().time()
            try:
                await self._sent(connection, request)
                return connection
            except BrokenAnswer:
                if connection.began or asyncio.get_running_loop().time() - sent > _CLOSING_SECONDS:
                    raise
        return await self._sent(await self._connect(), request)

    async def _sent(self, connection: HttpConnection, request: bytes) -> HttpConnection:
        try:
            await connection.request(request)
        except BaseException:
            connection.close()
            raise
        return connection

    def give_back(self, connection: HttpConnection) -> None:
        """What is not complete, or cannot be used again, is closed."""
        connection.listen(None)
        if connection.reusable and len(self._idle) < _MOST_IDLE:
            self._idle.append((connection, asyncio.get_running_loop().time()))
        else:
            connection.close()

    def give_back_at_end(self, connection: HttpConnection) -> None:
        """The same for one whose last bytes, which nobody needs, are about to come."""
        if connection.complete or connection.closed:
            self.give_back(connection)
        else:
            connection.listen(_LastBytes(self, connection))

    def close(self) -> None:
        """The idle ones."""
        while self._idle:
            self._idle.pop()[0].close()

    def _take(self) -> HttpConnection | None:
        since = asyncio.get_running_loop().time() - _IDLE_SECONDS
        while self._idle:
            connection, idle_since = self._idle.pop()
            if idle_since >= since and not connection.closed:
                return connection
            connection.close()
        return None

    async def _connect(self) -> HttpConnection:
        return await connected(self._url.host, self._url.port, self._tls, self._url.host, self._connect_timeout)


async def connected(address: str, port: int, tls: ssl.SSLContext | None, host: str, seconds: float) -> HttpConnection:
    """A new connection. `host`: the name that the certificate must have, where there is `tls`; `address` may be one of
    its addresses. Raises CannotConnect."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(seconds):
            _, connection = await loop.create_connection(
                HttpConnection, address, port, ssl=tls, server_hostname=None if tls is None else host
            )
    except TimeoutError:
        raise CannotConnect("it did not take the connection in time") from None
    except ssl.SSLCertVerificationError:
        raise CannotConnect("its certificate is not one that this server trusts") from None
    except (OSError, UnicodeError) as error:  # of the resolver, for names that cannot be
        raise CannotConnect(_reason(error)) from None
    return connection


class _LastBytes:
    """Implements Sink."""

    def __init__(self, pool: ConnectionPool, connection: HttpConnection) -> None:
        self._pool = pool
        self._connection = connection
        self._timer = asyncio.get_running_loop().call_later(_LAST_SECONDS, connection.close)

    def data(self, piece: bytes) -> None:
        self._connection.close()  # it goes on, and nobody knows for how long

    def ended(self, error: BrokenAnswer | None) -> None:
        self._timer.cancel()
        self._pool.give_back(self._connection)


def _reason(error: Exception) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "it refuses connections"
    return "it cannot be reached"
