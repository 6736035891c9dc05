"""Connections to one server: those that are idle are used again for a while."""

from __future__ import annotations

import asyncio
import ssl

from penstock.gateway.configuration.upstream_settings import BaseUrl
from penstock.gateway.upstream.http_connection import BrokenAnswer, HttpConnection

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
        loop = asyncio.get_running_loop()
        name = self._url.host if self._tls is not None else None
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await loop.create_connection(
                    HttpConnection, self._url.host, self._url.port, ssl=self._tls, server_hostname=name
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
