"""The listening server, driven by its owner: it handles no signals and never ends the process.

start() ──► stop_accepting() ──► stop(seconds)

Drain as a whole (the lifecycle's business): `drain.begin()`, let load balancers see readiness fall, `stop_accepting()`,
`drain.wait_idle(...)`, `drain.expire()`, `stop(...)`.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import Server, ServerState

from penstock.gateway.front.acceptor import Acceptor
from penstock.gateway.front.intake import Intake
from penstock.gateway.front.port_connections import PortConnections
from penstock.gateway.front.tls import TlsSettings
from penstock.gateway.http.http2_connection import (
    MultiplexedConnection,
    MultiplexedPort,
    http2_limits,
    socket_settings,
)
from penstock.gateway.http.limits import ConnectionLimits
from penstock.gateway.http.protocol import LimitedProtocol
from penstock.gateway.http2_sockets.connection import watch


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
    intake: Intake = field(default_factory=Intake)
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
        state = ServerState()
        self._connections = PortConnections(settings.limits.max_connections, cast("Any", state.connections))
        limits, open_ones = settings.limits, self._connections
        self._http2 = MultiplexedPort(
            settings=socket_settings(limits),
            limits=http2_limits(limits),
            connections=open_ones,
            bodies=settings.intake.bodies,
            unread=settings.intake.unread,
            app=app,
            http_limits=limits,
            tasks=state.tasks,
            default_headers=lambda: state.default_headers,
        )
        new_http2 = (lambda: MultiplexedConnection(self._http2)) if settings.http2 else None
        self._protocol = cast(
            "Any", partial(LimitedProtocol, limits=limits, port_connections=open_ones, new_http2=new_http2)
        )
        config = Config(
            app,
            http=self._protocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=settings.limits.keep_alive_timeout,  # type: ignore[arg-type]  # call_later takes floats
            backlog=settings.backlog,
        )
        self._server = Server(config)
        self._server.server_state = state

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
        self._server.config.load()
        await self._server.on_tick(0)
        await self._acceptor.start()
        self._ticker = asyncio.create_task(self._tick())

    def _connection(self) -> asyncio.Protocol:
        config, state = self._server.config, self._server.server_state
        protocol: asyncio.Protocol = self._protocol(config=config, server_state=state, app_state={})
        return protocol

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
        tasks = self._server.server_state.tasks
        if tasks:
            await asyncio.wait(tuple(tasks), timeout=seconds)
        if self._ticker is not None:
            self._ticker.cancel()

    async def _tick(self) -> None:
        """Renews the Date header, and looks at what takes too long."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(1.0)
            await self._server.on_tick(0)
            watch(self._connections, loop.time())
