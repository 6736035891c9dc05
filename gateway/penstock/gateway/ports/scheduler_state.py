"""What an operator looks at beyond metrics: the scheduler's state as JSON, once or as a live feed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from sse_starlette import EventSourceResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.engines.client.engine import Engine
from penstock.engines.host.redaction import Redaction
from penstock.engines.replicas.state import ReplicaState, Replicated
from penstock.gateway.configuration.config import Config
from penstock.gateway.front.access import OPERATE
from penstock.gateway.front.journal import RequestJournal
from penstock.gateway.llm.dataplane import DataPlane
from penstock.gateway.ports.requests_in_flight import Others, RequestsInFlight
from penstock.gateway.ports.routes import GuardedRoute

_INTERVAL_SECONDS = 1.0


class SchedulerState:
    """GET /debug/scheduler: for each model queue, batch, blocks, and how requests have ended."""

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = msgspec.json.encode(snapshot(self._dataplane))
        await Response(body, media_type="application/json")(scope, receive, send)


class SchedulerFeed:
    """GET /debug/scheduler/stream: the same every second, as server-sent events (curl -N, or a browser)."""

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await EventSourceResponse(self._events())(scope, receive, send)

    async def _events(self) -> AsyncIterator[dict[str, str]]:
        while True:
            yield {"data": msgspec.json.encode(snapshot(self._dataplane)).decode()}
            await asyncio.sleep(_INTERVAL_SECONDS)


def snapshot(dataplane: DataPlane) -> dict[str, Any]:
    """Model name -> readiness and EngineStats by field name, and where there are replicas the same of each."""
    return {name: _state(model.engine) for name, model in dataplane.models.loaded()}


def _state(engine: Engine) -> dict[str, Any]:
    state: dict[str, Any] = {"ready": engine.ready, **engine.stats.by_name()}
    if isinstance(engine, Replicated):
        state["moves"] = engine.moves
        state["replicas"] = [_replica(each) for each in engine.replica_states()]
    return state


def _replica(replica: ReplicaState) -> dict[str, Any]:
    named = {field.name: getattr(replica, field.name) for field in dataclasses.fields(replica)}
    return named | {"stats": replica.stats.by_name()}


class SettingsView:
    """GET /debug/settings: the server's settings, without keys and passwords."""

    def __init__(self, config: Config) -> None:
        self._config = config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = msgspec.json.encode(Redaction().tree(msgspec.to_builtins(self._config)))
        await Response(body, media_type="application/json")(scope, receive, send)


def operator_routes(
    config: Config, dataplane: DataPlane, journal: RequestJournal, others: Others | None = None
) -> list[GuardedRoute]:
    """`others`: of the requests in other processes."""
    return [
        GuardedRoute("/debug/settings", SettingsView(config), OPERATE, methods=["GET"]),
        GuardedRoute("/debug/requests", RequestsInFlight(journal, others), OPERATE, methods=["GET"]),
        GuardedRoute("/debug/scheduler", SchedulerState(dataplane), OPERATE, methods=["GET"]),
        GuardedRoute("/debug/scheduler/stream", SchedulerFeed(dataplane), OPERATE, methods=["GET"]),
    ]
