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
from uvicorn.server import Server

from penstock.gateway.front.listening import listener
from penstock.gateway.front.tls import Certificates, ReloadedCertificates, TlsSettings
from penstock.gateway.http.limits import ConnectionLimits
from penstock.gateway.http.protocol import LimitedProtocol

_KERNEL_BACKLOG = 128 << 10
"""Bytes that the kernel may hold for a client whose window is full. Its default of megabytes would hide for long that a
client does not read, and that a slow one does."""
_CLOSING_SECONDS = 3600.0
"""That a TLS connection may take to close. Readers that are slow may need long; those that do not read at all the
protocol cuts off by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port; see HttpServer.port."""
    backlog: int = 2048
    reuse_port: bool = False
    """For several front processes on one port."""
    tls: TlsSettings = field(default_factory=lambda: TlsSettings(port="http"))
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)


class HttpServer:
    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        """Raises ConfigError, with the flag to blame, when the TLS files are not usable."""
        self._settings = settings
        self._certificates = ReloadedCertificates(settings.tls) if settings.tls.enabled else None
        self._following: asyncio.Task[None] | None = None
        self._socket: socket.socket | None = None
        self._listener: asyncio.Server | None = None
        self._lost = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._port: int | None = None
        self._protocol = cast("Any", partial(LimitedProtocol, limits=settings.limits, on_lost=self._lost.set))
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

    @property
    def port(self) -> int:
        """The bound port. Raises RuntimeError before `start`."""
        if self._port is None:
            raise RuntimeError("The server is not started.")
        return self._port

    @property
    def connections(self) -> int:
        return len(self._server.server_state.connections)

    async def start(self) -> None:
        """Binds and accepts from now on. Raises OSError when the address cannot be bound."""
        settings = self._settings
        bound = listener(settings.host, settings.port, backlog=settings.backlog, reuse_port=settings.reuse_port)
        bound.setblocking(False)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # accepted sockets inherit it
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _KERNEL_BACKLOG)
        self._port = bound.getsockname()[1]
        self._server.config.load()
        await self._server.on_tick(0)
        self._socket = bound
        await self._listen(self._certificates.current if self._certificates is not None else None)
        self._ticker = asyncio.create_task(self._tick())
        if self._certificates is not None:
            self._following = asyncio.create_task(self._certificates.follow(self._listen))

    async def _listen(self, certificates: Certificates | None) -> None:
        """Accepts with these certificates from now on. Each listener has its own copy of the socket's descriptor, so
        that none of the connections that wait in the kernel is lost when the next one takes over."""
        if self._socket is None:
            return
        tls: dict[str, Any] = {}
        if certificates is not None:
            tls["ssl"] = certificates.context
            tls["ssl_handshake_timeout"] = self._settings.limits.header_timeout
            tls["ssl_shutdown_timeout"] = _CLOSING_SECONDS
        former = self._listener
        loop = asyncio.get_running_loop()
        copy = self._socket.dup()
        self._listener = await loop.create_server(self._connection, sock=copy, backlog=self._settings.backlog, **tls)
        if former is not None:
            former.close()

    def _connection(self) -> asyncio.Protocol:
        config, state = self._server.config, self._server.server_state
        protocol: asyncio.Protocol = self._protocol(config=config, server_state=state, app_state={})
        return protocol

    def reload_certificates(self) -> None:
        """For new connections; does nothing without TLS."""
        if self._certificates is not None:
            self._certificates.reload()

    def stop_accepting(self) -> None:
        """Closes the listener; connections live on. Idempotent."""
        if self._following is not None:
            self._following.cancel()
        if self._listener is not None:
            self._listener.close()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    async def stop(self, seconds: float = 5.0) -> None:
        """Closes idle connections, lets running responses end for that long, and cuts off the rest."""
        self.stop_accepting()
        state = self._server.server_state
        for connection in tuple(state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(seconds):
                await self._all_lost()
        except TimeoutError:
            for connection in tuple(state.connections):
                connection.transport.abort()
        if state.tasks:
            await asyncio.wait(tuple(state.tasks), timeout=seconds)
        if self._ticker is not None:
            self._ticker.cancel()

    async def _all_lost(self) -> None:
        while self._server.server_state.connections:
            self._lost.clear()
            await self._lost.wait()

    async def _tick(self) -> None:
        """Renews the Date header."""
        while True:
            await asyncio.sleep(1.0)
            await self._server.on_tick(0)
