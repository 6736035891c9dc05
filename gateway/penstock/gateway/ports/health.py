"""Health and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import msgspec

from penstock.gateway.front.access import PROBE, SEE_METRICS
from penstock.gateway.front.drain import DrainState
from penstock.gateway.front.server_health import ServerHealth
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.http.routes import SERVER, Route
from penstock.gateway.http.settings import AppSettings


def health_routes(settings: AppSettings, health: ServerHealth) -> list[Route]:
    live, ready = partial(_live, health), partial(_ready, health, settings.drain)
    metrics = partial(_metrics, settings)
    return [
        Route("GET", "/health", PROBE, live, SERVER),
        Route("GET", "/health/live", PROBE, live, SERVER),
        Route("GET", "/health/ready", PROBE, ready, SERVER),
        Route("GET", "/metrics", SEE_METRICS, metrics, SERVER),
        Route("GET", "/metrics/", SEE_METRICS, metrics, SERVER),
    ]


def ping_routes(settings: AppSettings, health: ServerHealth) -> list[Route]:
    """As SageMaker asks."""
    ready = partial(_ready, health, settings.drain)
    return [Route(method, "/ping", PROBE, ready, SERVER) for method in ("GET", "POST")]


async def _live(health: ServerHealth, exchange: Exchange) -> None:
    """200, or 503 when only a new process can help."""
    live = health.live()
    await _say(exchange, live, "live" if live else "dead")


async def _ready(health: ServerHealth, drain: DrainState, exchange: Exchange) -> None:
    """200 while new requests should come here: loaded, stepping, not about to stop."""
    if drain.leaving:
        await _say(exchange, False, "draining")
    else:
        ready = health.ready()
        await _say(exchange, ready, "ready" if ready else "not ready", {} if ready else health.loading())


async def _metrics(settings: AppSettings, exchange: Exchange) -> None:
    body, content_type = await settings.metrics()
    await exchange.respond(200, body, content_type=content_type.encode())


async def _say(exchange: Exchange, good: bool, status: str, loading: Mapping[str, str] | None = None) -> None:
    body = {"status": status} | ({"loading": loading} if loading else {})
    await exchange.respond(200 if good else 503, msgspec.json.encode(body))
