"""Health, metadata, configuration and statistics under /v2."""

from __future__ import annotations

import msgspec

from penstock.classic.base import InferModel, reports_ready
from penstock.classic.model_config import config_json
from penstock.engines.errors import PenstockError
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.kserve.context import KServe
from penstock.gateway.kserve.metadata import model_metadata, server_metadata, would_load
from penstock.gateway.kserve.statistics import statistics

_NOT_READY = msgspec.json.encode({"error": "Model version not ready"})


async def live(context: KServe, exchange: Exchange) -> None:
    """200, or 503 when only a new process can help; Triton's has one answer."""
    good = context.health.live()
    await _tell(exchange, 200 if good else 503, {"live": good})


async def ready(context: KServe, exchange: Exchange) -> None:
    """200 or, as Triton says no, 400."""
    good = context.health.ready() and not exchange.drain.leaving
    await _tell(exchange, 200 if good else 400, {"ready": good})


async def _tell(exchange: Exchange, status: int, told: dict[str, object]) -> None:
    """KServe's client reads the body that the open inference protocol has. Triton's answer has none, and its scripts
    compare all that `curl` prints with the status: libraries say which encodings they read, curl does not."""
    if b"accept-encoding" in exchange.headers:
        await exchange.respond(status, msgspec.json.encode(told))
    else:
        await exchange.respond(status, b"", content_type=b"text/plain")


async def server(context: KServe, exchange: Exchange) -> None:
    await exchange.respond(200, msgspec.json.encode(server_metadata(context)))


async def model_ready(context: KServe, exchange: Exchange, name: str, version: str) -> None:
    """Not ready is 400, for models that do not exist too. One that the next request would load is ready."""
    try:
        good = reports_ready(context.models.model(name, version))
    except PenstockError:
        good = would_load(context, name)
    if good:
        await _tell(exchange, 200, {"name": name, "ready": True})
    else:
        await exchange.respond(400, _NOT_READY)


async def metadata(context: KServe, exchange: Exchange, name: str, version: str) -> None:
    model = await _described(context, exchange, name, version)
    versions = [model.version] if version else context.models.versions(name)
    await exchange.respond(200, msgspec.json.encode(model_metadata(model, versions)))


async def config(context: KServe, exchange: Exchange, name: str, version: str) -> None:
    model = await _described(context, exchange, name, version)
    await exchange.respond(200, config_json(model.config).encode())


async def _described(context: KServe, exchange: Exchange, name: str, version: str) -> InferModel:
    exchange.context.principal.require_model(name)
    if context.on_demand is not None:
        exchange.read_deadline()
        await context.on_demand.describe(name, exchange.context)
    return context.models.model(name, version)


async def model_statistics(context: KServe, exchange: Exchange, name: str = "", version: str = "") -> None:
    await exchange.respond(
        200, msgspec.json.encode(statistics(context.models, exchange.context.principal, name, version))
    )
