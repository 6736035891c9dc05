"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import msgspec
from starlette.types import Receive, Scope, Send

from penstock.gateway.http.exchange import SCOPE_KEY, Exchange
from penstock.gateway.llm.dataplane import DataPlane, ServedModel


class ModelObject(msgspec.Struct):
    id: str
    created: int
    root: str
    max_model_len: int
    parent: str | None
    """Of an adapter: its model."""
    object: str = "model"
    owned_by: str = "penstock"


class ModelList:
    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        may_use = exchange.context.principal.may_use
        data = [_model_object(model) for model in self._dataplane.models() if may_use(model.name)]
        await exchange.respond(200, msgspec.json.encode({"object": "list", "data": data}))


class ModelDetail:
    """The id is all of the path after /v1/models/: names may hold slashes."""

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        model = self._dataplane.model(scope["path_params"]["name"])
        exchange.context.principal.require_model(model.name)
        await exchange.respond(200, msgspec.json.encode(_model_object(model)))


def _model_object(model: ServedModel) -> ModelObject:
    return ModelObject(model.name, model.created, model.root, model.info.context_length, model.parent)
