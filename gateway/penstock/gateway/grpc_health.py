"""The gRPC port: the standard health service (grpc.health.v1), Check and Watch."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

# Engine processes are started by fork and exec; gRPC's fork handlers only cost there, and complain.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from penstock.gateway.addresses import url_host as url_host

_POLL_SECONDS = 0.5
"""How often readiness is looked at. It depends on time (an engine grows silent), so nothing could announce it."""
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class GrpcServer:
    """Serves from `start` to `stop`; reports the overall status under the empty service name, as the protocol says."""

    def __init__(self, host: str, port: int, ready: Callable[[], bool]) -> None:
        """Binds. Raises OSError when the address cannot be bound."""
        self._ready = ready
        self._health = health.aio.HealthServicer()
        # by default two servers would share a port in silence
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        try:
            self.port: int = self._server.add_insecure_port(f"{url_host(host)}:{port}")
        except RuntimeError:
            raise OSError(f"gRPC cannot bind {url_host(host)}:{port}") from None
        self._poll: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._server.start()
        self._poll = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        while True:
            await self._health.set("", _SERVING if self._ready() else _NOT_SERVING)
            await asyncio.sleep(_POLL_SECONDS)

    async def drain(self) -> None:
        """NOT_SERVING from now on, to those who watch, too."""
        if self._poll is not None:
            self._poll.cancel()
        await self._health.enter_graceful_shutdown()

    async def stop(self) -> None:
        await self._server.stop(grace=1.0)
