"""The listening side of the port."""

from __future__ import annotations

import asyncio
import logging

from penstock.gateway.front.acceptor import Acceptor
from penstock.gateway.front.intake import BodyBudget
from penstock.gateway.front.tls import TlsSettings
from penstock.gateway.front.unread_answers import UnreadAnswers
from penstock.gateway.grpc_transport.connection import FindHandler, GrpcConnection, PortState
from penstock.gateway.grpc_transport.settings import ConnectionSettings
from penstock.gateway.http2.limits import Http2Limits

logger = logging.getLogger("penstock.grpc")

_BACKLOG = 2048
_TICK_SECONDS = 1.0


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
    ) -> None:
        """Binds. Raises OSError, ConfigError."""
        self._state = PortState(settings, limits, find_handler, bodies, unread, set(), asyncio.Event())
        self._acceptor = Acceptor(tls, lambda: GrpcConnection(self._state), settings.start_seconds, _BACKLOG)
        self.port = self._acceptor.bind(host, port)
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._acceptor.start()
        self._ticker = asyncio.create_task(self._tick())

    def reload_certificates(self) -> None:
        """For new connections; does nothing without TLS."""
        self._acceptor.reload_certificates()

    async def stop(self, grace: float) -> None:
        """Takes no more calls; those that run get so many seconds."""
        self._acceptor.close()
        self._state.stopping = True
        connections = self._state.connections
        for connection in tuple(connections):
            connection.refuse_calls()
        try:
            async with asyncio.timeout(grace):
                await self._all_lost()
        except TimeoutError:
            for connection in tuple(connections):
                connection.abort()
            await self._all_lost()
        if self._ticker is not None:
            self._ticker.cancel()

    async def _all_lost(self) -> None:
        while self._state.connections:
            self._state.lost.clear()
            await self._state.lost.wait()

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now = loop.time()
            for connection in tuple(self._state.connections):
                try:
                    connection.tick(now)
                except Exception as error:  # the others must be watched on
                    logger.error("a connection is closed", exc_info=error)
                    connection.abort()
