"""Health, version and metrics."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.types import Receive, Scope, Send

from penstock.gateway.front.drain import DrainState
from penstock.gateway.front.server_health import ServerHealth
from penstock.gateway.http.exchange import SCOPE_KEY, Exchange
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.llm.dataplane import DataPlane
from penstock.gateway.pooling.plane import PoolingPlane


class Live:
    """200, or 503 when only a new process can help."""

    def __init__(self, health: ServerHealth) -> None:
        self._health = health

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        live = self._health.live()
        await _say(scope, live, "live" if live else "dead")


class Ready:
    """200 while new requests should come here: loaded, stepping, not about to stop."""

    def __init__(self, health: ServerHealth, drain: DrainState) -> None:
        self._health = health
        self._drain = drain

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._drain.leaving:
            await _say(scope, False, "draining")
        else:
            ready = self._health.ready()
            await _say(scope, ready, "ready" if ready else "not ready", {} if ready else self._health.loading())


class Version:
    """The server's version, and how each model is run."""

    def __init__(self, dataplane: DataPlane, pooling: PoolingPlane, settings: AppSettings) -> None:
        self._dataplane = dataplane
        self._pooling = pooling
        self._version = settings.version

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        runners = {model.name: model.info.runner for model in self._dataplane.models.served() if model.parent is None}
        runners |= {name: model.source.info.runner for name, model in self._pooling.loaded_names()}
        exchange: Exchange = scope[SCOPE_KEY]
        may_use = exchange.context.principal.may_use
        runners = {name: runner for name, runner in runners.items() if may_use(name)}
        await exchange.respond(200, msgspec.json.encode({"version": self._version, "runners": runners}))


class Metrics:
    def __init__(self, settings: AppSettings) -> None:
        self._metrics = settings.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, content_type = await self._metrics()
        exchange: Exchange = scope[SCOPE_KEY]
        await exchange.respond(200, body, content_type=content_type.encode())


async def _say(scope: Scope, good: bool, status: str, loading: Mapping[str, str] | None = None) -> None:
    exchange: Exchange = scope[SCOPE_KEY]
    body = {"status": status} | ({"loading": loading} if loading else {})
    await exchange.respond(200 if good else 503, msgspec.json.encode(body))
