"""The listening server, driven by its owner: it handles no signals and never ends the process.

start() ──► stop_accepting() ──► stop(seconds)

Drain as a whole (the lifecycle's business): `drain.begin()`, let load balancers see readiness fall, `stop_accepting()`,
`drain.wait_idle(...)`, `drain.expire()`, `stop(...)`.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field

from starlette.types import ASGIApp

from penstock.gateway.requests.acceptor import Acceptor
from penstock.gateway.requests.connections import PortConnections
from penstock.gateway.requests.intake import BodyIntake
from penstock.gateway.requests.tls import TlsSettings
from penstock.gateway.transports.http.http1 import Http1Connection
from penstock.gateway.transports.http.http2 import MultiplexedConnection, http2_limits, socket_settings
from penstock.gateway.transports.http.stream import ConnectionLimits, HttpPort
from penstock.gateway.transports.sockets.connection import watch

_TICK_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port; see HttpServer.port."""
    backlog: int = 2048
    listener: socket.socket | None = None
    """Bound already, by the process that has started this one; None: `start` binds."""
    tls: TlsSettings = field(default_factory=lambda: TlsSettings(port="http"))
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)
    intake: BodyIntake = field(default_factory=BodyIntake)
    http2: bool = True
    """Beside HTTP/1.1: by ALPN under TLS, by prior knowledge without."""


class HttpServer:
    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        """Raises ConfigError, with the flag to blame, when the TLS files are not usable."""
        self._settings = settings
        handshake = settings.limits.header_timeout
        self._acceptor = Acceptor(settings.tls, self._connection, handshake, settings.backlog)
        self._ticker: asyncio.Task[None] | None = None
        self._port: int | None = None
        limits = settings.limits
        self._connections = PortConnections(limits.max_connections)
        self._shared = HttpPort(
            settings=socket_settings(limits),
            limits=http2_limits(limits),
            connections=self._connections,
            bodies=settings.intake.bodies,
            unread=settings.intake.unread,
            app=app,
            http_limits=limits,
        )
        self._new_http2 = (lambda: MultiplexedConnection(self._shared)) if settings.http2 else None

    @property
    def port(self) -> int:
        """The bound port. Raises RuntimeError before `start`."""
        if self._port is None:
            raise RuntimeError("The server is not started.")
        return self._port

    @property
    def connections(self) -> int:
        return len(self._connections)

    def connections_by_version(self) -> dict[str, int]:
        """Those that have said nothing yet count as 1.1."""
        http2 = sum(isinstance(connection, MultiplexedConnection) for connection in self._connections)
        return {"1.1": len(self._connections) - http2, "2": http2}

    async def start(self) -> None:
        """Binds and accepts from now on. Raises OSError when the address cannot be bound."""
        settings = self._settings
        if settings.listener is None:
            self._port = self._acceptor.bind(settings.host, settings.port)
        else:
            self._port = self._acceptor.take(settings.listener)
        self._shared.tick()
        await self._acceptor.start()
        self._ticker = asyncio.create_task(self._tick())

    def _connection(self) -> Http1Connection:
        return Http1Connection(self._shared, self._new_http2)

    def reload_certificates(self) -> None:
        """For new connections; does nothing without TLS."""
        self._acceptor.reload_certificates()

    def drain(self) -> None:
        """Clients of HTTP/2 are asked to open another connection for further requests. Those of HTTP/1.1 learn it with
        their next answer."""
        for connection in self._connections:
            if isinstance(connection, MultiplexedConnection):
                connection.leave("draining")

    def stop_accepting(self) -> None:
        """Closes the listener; connections live on. Idempotent."""
        self._acceptor.close()

    async def stop(self, seconds: float = 5.0) -> None:
        """Closes idle connections, lets running responses end for that long, and cuts off the rest."""
        self.stop_accepting()
        await self._connections.stop(seconds)
        tasks = [stream.task for stream in self._shared.running]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        if self._ticker is not None:
            self._ticker.cancel()

    async def _tick(self) -> None:
        """Renews the Date header, and looks at what takes too long."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            self._shared.tick()
            watch(self._connections, loop.time())
