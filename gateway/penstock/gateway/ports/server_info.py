"""GET /version, and GET /server_info as SGLang's servers have it: its gateway asks the servers behind it which model
they serve."""

from __future__ import annotations

from functools import partial

import msgspec

from penstock.gateway.front.access import SEE_METADATA
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.http.routes import SERVER, Route
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.llm.dataplane import DataPlane
from penstock.gateway.pooling.plane import PoolingPlane


class ServerInfoObject(msgspec.Struct, omit_defaults=True):
    version: str
    served_model_name: str | None = None
    """The first language model's name; none while no model is loaded."""
    max_running_requests: int | None = None
    """Requests that it computes together."""
    max_total_num_tokens: int | None = None
    """That its KV cache has room for."""


def info_routes(dataplane: DataPlane, pooling: PoolingPlane, settings: AppSettings) -> list[Route]:
    version, info = partial(_show_version, dataplane, pooling, settings), partial(_show_info, dataplane, settings)
    return [
        Route("GET", "/version", SEE_METADATA, version, SERVER),
        Route("GET", "/server_info", SEE_METADATA, info, SERVER),
    ]


async def _show_version(dataplane: DataPlane, pooling: PoolingPlane, settings: AppSettings, exchange: Exchange) -> None:
    """The server's version, and how each model is run."""
    runners = {model.name: model.info.runner for model in dataplane.models.served() if model.parent is None}
    runners |= {name: model.source.info.runner for name, model in pooling.loaded_names()}
    may_use = exchange.context.principal.may_use
    runners = {name: runner for name, runner in runners.items() if may_use(name)}
    await exchange.respond(200, msgspec.json.encode({"version": settings.version, "runners": runners}))


async def _show_info(dataplane: DataPlane, settings: AppSettings, exchange: Exchange) -> None:
    """The server's version, and its first language model."""
    info, loaded = ServerInfoObject(settings.version), dataplane.models.loaded()
    if loaded:
        name, model = loaded[0]
        tokens = model.engine.stats.num_blocks * model.engine.info.block_size
        info = ServerInfoObject(settings.version, name, model.max_num_seqs, tokens)
    await exchange.respond(200, msgspec.json.encode(info))
