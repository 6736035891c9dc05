"""What an operator looks at beyond metrics: the scheduler's state as JSON, once or as a live feed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec
from sse_starlette import EventSourceResponse

from penstock.engines.client.engine import Engine
from penstock.engines.host.redaction import Redaction
from penstock.engines.replicas.state import ReplicaState, Replicated
from penstock.gateway.configuration.config import Config
from penstock.gateway.front.access import OPERATE
from penstock.gateway.front.journal import RequestJournal
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.http.routes import SERVER, Route
from penstock.gateway.llm.dataplane import DataPlane
from penstock.gateway.ports.requests_in_flight import Others, RequestsInFlight

_INTERVAL_SECONDS = 1.0


def operator_routes(
    config: Config, dataplane: DataPlane, journal: RequestJournal, others: Others | None = None
) -> list[Route]:
    """`others`: of the requests in other processes."""
    rows = (
        ("/debug/settings", partial(_show_settings, config)),
        ("/debug/requests", RequestsInFlight(journal, others).show),
        ("/debug/scheduler", partial(_show_state, dataplane)),
        ("/debug/scheduler/stream", partial(_feed, dataplane)),
    )
    return [Route("GET", path, OPERATE, handle, SERVER) for path, handle in rows]


async def _show_settings(config: Config, exchange: Exchange) -> None:
    """The server's settings, without keys and passwords."""
    body = msgspec.json.encode(Redaction().tree(msgspec.to_builtins(config)))
    await exchange.respond(200, body)


async def _show_state(dataplane: DataPlane, exchange: Exchange) -> None:
    """For each model queue, batch, blocks, and how requests have ended."""
    await exchange.respond(200, msgspec.json.encode(snapshot(dataplane)))


async def _feed(dataplane: DataPlane, exchange: Exchange) -> None:
    """The same every second, as server-sent events (curl -N, or a browser)."""
    await EventSourceResponse(_events(dataplane))(exchange.scope, exchange.receive, exchange.send)


async def _events(dataplane: DataPlane) -> AsyncIterator[dict[str, str]]:
    while True:
        yield {"data": msgspec.json.encode(snapshot(dataplane)).decode()}
        await asyncio.sleep(_INTERVAL_SECONDS)


def snapshot(dataplane: DataPlane) -> dict[str, Any]:
    """Model name -> readiness and EngineStats by field name, and where there are replicas the same of each."""
    return {name: _state(model.engine) for name, model in dataplane.models.loaded()}


def _state(engine: Engine) -> dict[str, Any]:
    state: dict[str, Any] = {"ready": engine.ready, **msgspec.structs.asdict(engine.stats)}
    if isinstance(engine, Replicated):
        state["moves"] = engine.moves
        state["replicas"] = [_replica(each) for each in engine.replica_states()]
    return state


def _replica(replica: ReplicaState) -> dict[str, Any]:
    named = {field.name: getattr(replica, field.name) for field in dataclasses.fields(replica)}
    return named | {"stats": msgspec.structs.asdict(replica.stats)}
