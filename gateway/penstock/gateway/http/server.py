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
from typing import Any

from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.server import Server

from penstock.gateway.front.listening import listener
from penstock.gateway.http.limits import ConnectionLimits
from penstock.gateway.http.protocol import LimitedProtocol

_KERNEL_BACKLOG = 128 << 10
"""Bytes that the kernel may hold for a client whose window is full. Its default of megabytes would hide for long that a
client does not read, and that a slow one does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port; see HttpServer.port."""
    backlog: int = 2048
    reuse_port: bool = False
    """For several front processes on one port."""
    tls_certificate: str | None = None
    tls_key: str | None = None
    limits: ConnectionLimits = field(default_factory=ConnectionLimits)


class HttpServer:
    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._settings = settings
        self._lost = asyncio.Event()
        self._ticker: asyncio.Task[None] | None = None
        self._port: int | None = None
        protocol: Any = partial(LimitedProtocol, limits=settings.limits, on_lost=self._lost.set)
        config = Config(
            app,
            http=protocol,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=settings.limits.keep_alive_timeout,  # type: ignore[arg-type]  # call_later takes floats
            backlog=settings.backlog,
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
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
        config = self._server.config
        config.load()
        self._server.lifespan = config.lifespan_class(config)
        await self._server.on_tick(0)
        await self._server.startup(sockets=[bound])
        self._ticker = asyncio.get_running_loop().create_task(self._tick())

    def stop_accepting(self) -> None:
        """Closes the listener; connections live on. Idempotent."""
        for server in self._server.servers:
            server.close()

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
