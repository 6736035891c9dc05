"""A Ray Serve replica: a whole server in an actor."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import ray
from ray import serve
from ray.serve import metrics
from starlette.types import ASGIApp

from penstock.gateway.configuration.config import Config, overlay
from penstock.gateway.ray_serve import grpc_calls
from penstock.gateway.ray_serve.replica_server import ReplicaServer
from penstock.gateway.ray_serve.routing import READY

_REPORT_SECONDS = 5.0
_FIGURES = {
    "waiting": ("penstock_requests_waiting", "Requests in the queues of the replica's engines."),
    "running": ("penstock_running_share", "Share of the places for running requests."),
    "kv_usage": ("penstock_kv_cache_usage", "Share of the KV cache that requests hold."),
}


class PenstockReplica:
    """What Serve calls by name stands here; all else is in `ReplicaServer`."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        """`settings`: those of the server, by name. Raises ConfigError, PenstockError."""
        # vLLM's Ray executor runs in the engine process below this one, and has to find the same cluster
        os.environ.setdefault("RAY_ADDRESS", ray.get_runtime_context().gcs_address)
        name = serve.get_replica_context().replica_id.unique_id
        self._server = ReplicaServer(overlay(Config(), settings), name)
        self._service = self._server.grpc_service()  # settings that are wrong are told before models are loaded
        await self._server.start()
        self._reporting = asyncio.create_task(self._report())

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._server

    async def check_health(self) -> None:
        self._server.check()

    async def record_routing_stats(self) -> dict[str, bool]:
        return {READY: self._server.ready}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return self._server.load().figures()

    async def _report(self) -> None:
        """The replica's load among Ray's metrics."""
        gauges = {name: metrics.Gauge(known_as, description=text) for name, (known_as, text) in _FIGURES.items()}
        while True:
            for name, value in self._server.load().figures().items():
                gauges[name].set(value)
            await asyncio.sleep(_REPORT_SECONDS)

    async def __del__(self) -> None:
        """Serve calls it when the replica's requests have ended, or their time is over."""
        self._reporting.cancel()
        await self._server.stop()


def _unary(name: str) -> Callable[..., Any]:
    async def method(self: PenstockReplica, request: Any, grpc_context: Any) -> grpc_calls.ServedBytes:
        return await grpc_calls.call(self._service, name, request, grpc_context)

    return method


def _streamed(name: str) -> Callable[..., Any]:
    async def method(self: PenstockReplica, requests: Any, grpc_context: Any) -> AsyncIterator[grpc_calls.ServedBytes]:
        async for answer in grpc_calls.stream(self._service, name, requests, grpc_context):
            yield answer

    return method


for _name in grpc_calls.UNARY:
    setattr(PenstockReplica, _name, _unary(_name))
for _name in grpc_calls.STREAMED:
    setattr(PenstockReplica, _name, _streamed(_name))
