"""Health, metrics, and versions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import msgspec

from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.models.pooling.model import PoolingModel
from penstock.gateway.requests.access import PROBE, SEE_METADATA, SEE_METRICS
from penstock.gateway.requests.call import DrainState
from penstock.gateway.requests.server_health import ServerHealth
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.routes import SERVER, Route
from penstock.gateway.transports.http.settings import AppSettings


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


# GET /version, and GET /server_info as SGLang's servers have it: its gateway asks the servers behind it which model
# they serve.


class ServerInfoObject(msgspec.Struct, omit_defaults=True):
    version: str
    served_model_name: str | None = None
    """The first language model's name; none while no model is loaded."""
    max_running_requests: int | None = None
    """Requests that it computes together."""
    max_total_num_tokens: int | None = None
    """That its KV cache has room for."""


def info_routes(models: Catalogue, settings: AppSettings) -> list[Route]:
    version, info = partial(_show_version, models, settings), partial(_show_info, models, settings)
    return [
        Route("GET", "/version", SEE_METADATA, version, SERVER),
        Route("GET", "/server_info", SEE_METADATA, info, SERVER),
    ]


async def _show_version(models: Catalogue, settings: AppSettings, exchange: Exchange) -> None:
    """The server's version, and how each model is run."""
    runners = {model.name: model.info.runner for model in models.served() if model.parent is None}
    runners |= {name: model.source.info.runner for name, model in models.listed() if isinstance(model, PoolingModel)}
    may_use = exchange.context.principal.may_use
    runners = {name: runner for name, runner in runners.items() if may_use(name)}
    await exchange.respond(200, msgspec.json.encode({"version": settings.version, "runners": runners}))


async def _show_info(models: Catalogue, settings: AppSettings, exchange: Exchange) -> None:
    """The server's version, and its first language model."""
    info, loaded = ServerInfoObject(settings.version), models.loaded()
    if loaded:
        name, model = loaded[0]
        tokens = model.engine.stats.num_blocks * model.engine.info.block_size
        info = ServerInfoObject(settings.version, name, model.max_num_seqs, tokens)
    await exchange.respond(200, msgspec.json.encode(info))
