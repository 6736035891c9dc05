"""The listening side of the port."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

from penstock.gateway.front.acceptor import Acceptor
from penstock.gateway.front.intake import BodyBudget
from penstock.gateway.front.port_connections import PortConnections
from penstock.gateway.front.tls import TlsSettings
from penstock.gateway.front.unread_answers import UnreadAnswers
from penstock.gateway.grpc_transport.connection import FindHandler, GrpcConnection, GrpcPort
from penstock.gateway.grpc_transport.settings import ConnectionSettings
from penstock.gateway.http2.bounds import Http2Limits
from penstock.gateway.http2_sockets.base import watch

_BACKLOG = 2048
_TICK_SECONDS = 1.0
_LEAVE_SECONDS = 1.0
"""For clients to see that the port closes."""


class Http2Transport:
    """Serves from `start` to `stop`. Made and used on the event loop."""

    def __init__(
        self,
        host: str,
        port: int,
        tls: TlsSettings,
        settings: ConnectionSettings,
        limits: Http2Limits,
        find_handler: FindHandler,
        bodies: BodyBudget,
        unread: UnreadAnswers,
        listener: socket.socket | None = None,
    ) -> None:
        """Binds, unless it is given a socket that listens already. Raises OSError, ConfigError."""
        self._connections = PortConnections(settings.max_connections)
        self._grpc = GrpcPort(
            settings=settings,
            limits=limits,
            connections=self._connections,
            bodies=bodies,
            unread=unread,
            find_handler=find_handler,
        )
        self._acceptor = Acceptor(tls, lambda: GrpcConnection(self._grpc), settings.start_seconds, _BACKLOG)
        self.port = self._acceptor.bind(host, port) if listener is None else self._acceptor.take(listener)
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._acceptor.start()
        self._ticker = asyncio.create_task(self._tick())

    def reload_certificates(self) -> None:
        """For new connections; does nothing without TLS."""
        self._acceptor.reload_certificates()

    def drain(self) -> None:
        """Clients are told to open other connections for further calls; calls that run may end."""
        for connection in self._connections:
            if isinstance(connection, GrpcConnection):
                connection.leave("draining")

    async def leave(self, seconds: float = _LEAVE_SECONDS) -> None:
        """Takes no more connections, and tells all clients to open others. Calls that they make before they know are
        served: proxies may have no way to send them elsewhere. Returns when all know, at most after so many seconds."""
        self._grpc.leaving = True
        self.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._acceptor.refuse()
                await self._connections.until(self._begin_no_more)

    def _begin_no_more(self) -> bool:
        return all(each.begins_no_more for each in self._connections if isinstance(each, GrpcConnection))

    def refuse(self) -> None:
        """Takes no more calls; those that run may end."""
        self._connections.refuse()

    async def stop(self, grace: float) -> None:
        """Takes no more calls; those that run get so many seconds."""
        self._acceptor.close()
        await self._connections.stop(grace)
        if self._ticker is not None:
            self._ticker.cancel()

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            watch(self._connections, loop.time())
