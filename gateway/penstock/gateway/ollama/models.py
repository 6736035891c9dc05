"""What models there are: GET /api/tags, /api/ps and /api/version, POST /api/show."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.generating.bodies import parse
from penstock.gateway.http.exchange import SCOPE_KEY, Exchange
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.llm.dataplane import DataPlane, ServedModel
from penstock.gateway.ollama.names import model_name
from penstock.gateway.ollama.schemas import ShowRequest
from penstock.gateway.pooling.models import PoolingModel
from penstock.gateway.pooling.plane import PoolingPlane

_CAPABILITIES = ("completion", "tools", "thinking", "insert", "embedding")
"""Those that Ollama knows."""
_NEVER = "9999-12-31T23:59:59Z"
_LAST_SECOND = 253_402_300_799.0
"""The same in Unix seconds: dates end there, and callers may ask for more."""


class Models:
    """Those that are loaded, of both kinds, and those that a request would load."""

    def __init__(self, dataplane: DataPlane, pooling: PoolingPlane) -> None:
        self._dataplane = dataplane
        self._pooling = pooling

    def listed(self, exchange: Exchange) -> list[dict[str, Any]]:
        """That the caller may use. Sizes are not known here."""
        may_use = exchange.context.principal.may_use
        found = [(model.name, model.created) for model in self._dataplane.models.served()]
        found += [(name, model.created) for name, model in self._pooling.loaded_names()]
        found += [(name, 0) for name in self._dataplane.models.names_on_demand()]
        return [_entry(name, created) for name, created in found if may_use(name)]

    def running(self, exchange: Exchange) -> list[dict[str, Any]]:
        """Those of `listed` that are awake, with the time at which they fall asleep if no request comes."""
        found, unloaded = [], self._dataplane.models.names_on_demand()
        for entry in self.listed(exchange):
            if entry["name"] in unloaded:
                continue
            holder = self._dataplane.models.holder(entry["name"])
            if holder is not None and holder.model.sleep.asleep:
                continue
            left = None if holder is None else holder.model.sleep.seconds_left
            expires_at = _NEVER if left is None else _time(min(time.time() + left, _LAST_SECOND))
            found.append({**entry, "size_vram": 0, "expires_at": expires_at})
        return found

    def shown(self, given: str, exchange: Exchange) -> dict[str, Any]:
        """Raises ModelNotFoundError, PermissionDeniedError."""
        encoders = dict(self._pooling.loaded_names())
        name = model_name(given, lambda each: each in encoders or self._dataplane.models.knows(each))
        exchange.context.principal.require_model(name)
        if name in encoders:
            return _shown_encoder(encoders[name])
        if name in self._dataplane.models.names_on_demand():
            return _description(0, None, ["completion"])
        return _shown(self._dataplane.model(name))


class Running:
    """GET /api/ps: those that are awake, and how long they stay so."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        await exchange.respond(200, msgspec.json.encode({"models": self._models.running(exchange)}))


class Tags:
    def __init__(self, models: Models) -> None:
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        await exchange.respond(200, msgspec.json.encode({"models": self._models.listed(exchange)}))


class Show:
    schema = ShowRequest

    def __init__(self, models: Models, settings: AppSettings) -> None:
        self._models = models
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        request = parse(await exchange.body(self._settings.max_body_bytes, from_curl=True), ShowRequest, {})
        given = request.model or request.name
        if not given:
            raise InvalidRequestError("model is missing.", param="model")
        await exchange.respond(200, msgspec.json.encode(self._models.shown(given, exchange)))


class OllamaVersion:
    def __init__(self, settings: AppSettings) -> None:
        self._body = msgspec.json.encode({"version": settings.version})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        await exchange.respond(200, self._body)


def _entry(name: str, created: int) -> dict[str, Any]:
    digest = hashlib.sha256(f"{name} {created}".encode()).hexdigest()
    named = {"name": name, "model": name, "digest": digest}
    return {**named, "modified_at": _time(created), "size": 0, "details": _details()}


def _details() -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": "",
        "families": None,
        "parameter_size": "",
        "quantization_level": "",
    }


def _shown(model: ServedModel) -> dict[str, Any]:
    return _description(model.created, model.info.context_length, model.capabilities)


def _shown_encoder(model: PoolingModel) -> dict[str, Any]:
    return _description(model.created, model.source.info.max_tokens, model.capabilities)


def _description(created: int, context_length: int | None, capabilities: Sequence[str]) -> dict[str, Any]:
    """`context_length`: None for a model that is not loaded."""
    known = {} if context_length is None else {"model.context_length": context_length}
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": _details(),
        "model_info": {"general.architecture": "model", **known},
        "capabilities": [each for each in capabilities if each in _CAPABILITIES],
        "modified_at": _time(created),
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
