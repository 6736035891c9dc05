"""Views for operators beyond metrics: settings, requests in flight, and the scheduler's state, once or as a feed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import msgspec
from sse_starlette import EventSourceResponse

from penstock.engines.client.engine import Engine
from penstock.engines.errors import InvalidRequestError
from penstock.engines.host.redaction import Redaction
from penstock.engines.replicas.state import ReplicaState, Replicated
from penstock.gateway.configuration.config import Config
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.requests.access import OPERATE
from penstock.gateway.requests.request_watch import RequestChoice, ServerRequests
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.routes import SERVER, Route

_LIMIT, _MAX_LIMIT = 200, 10_000


async def _show_requests(requests: ServerRequests, exchange: Exchange) -> None:
    """Those in flight. `?limit=` bounds what is shown, `?tenant=` and `?model=` choose. Never prompts. Raises
    InvalidRequestError."""
    query = exchange.query
    limit = _limit(query.get("limit"))
    choice = RequestChoice(limit=limit, tenant=query.get("tenant"), model=query.get("model"))
    live = await requests.look(choice, exchange.context)
    body = {"in_flight": live.in_flight, "chosen": live.chosen, "requests": live.requests}
    await exchange.respond(200, msgspec.json.encode(body))


def _limit(text: str | None) -> int:
    if text is None:
        return _LIMIT
    if not text.isascii() or not text.isdigit() or len(text) > 5 or not 1 <= int(text) <= _MAX_LIMIT:
        raise InvalidRequestError(f"limit must be a number from 1 to {_MAX_LIMIT}.", param="limit")
    return int(text)


_INTERVAL_SECONDS = 1.0


def operator_routes(config: Config, dataplane: DataPlane, requests: ServerRequests) -> list[Route]:
    rows = (
        ("/debug/settings", partial(_show_settings, config)),
        ("/debug/requests", partial(_show_requests, requests)),
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
    state: dict[str, Any] = {"ready": engine.ready, **engine.stats.by_name()}
    if isinstance(engine, Replicated):
        state["moves"] = engine.moves
        state["replicas"] = [_replica(replica) for replica in engine.replica_states()]
    return state


def _replica(replica: ReplicaState) -> dict[str, Any]:
    named = {field.name: getattr(replica, field.name) for field in dataclasses.fields(replica)}
    return named | {"stats": replica.stats.by_name()}
