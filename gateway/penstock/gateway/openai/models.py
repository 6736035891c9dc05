"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import msgspec
from starlette.types import Receive, Scope, Send

from penstock.gateway.front.context import Principal
from penstock.gateway.http.exchange import SCOPE_KEY, Exchange
from penstock.gateway.http.text_models import TextModel, TextModels
from penstock.gateway.llm.dataplane import DataPlane, ServedModel
from penstock.gateway.pooling.models import PoolingModel
from penstock.gateway.pooling.plane import PoolingPlane


class ModelObject(msgspec.Struct):
    id: str
    created: int
    root: str
    max_model_len: int | None
    """None: the model is not loaded, a request will do that; or it is another server's."""
    parent: str | None
    """Of an adapter: its model."""
    capabilities: list[str]
    object: str = "model"
    owned_by: str = "penstock"


class ModelObjects:
    """All models that a caller may see, of whatever kind."""

    def __init__(self, dataplane: DataPlane, pooling: PoolingPlane, others: TextModels) -> None:
        self._dataplane = dataplane
        self._pooling = pooling
        self._others = others

    def all(self, principal: Principal) -> list[ModelObject]:
        objects = [_model_object(model) for model in self._dataplane.models.served()]
        objects += [_pooling_object(name, model) for name, model in self._pooling.loaded_names()]
        objects += [_unloaded(name) for name in self._dataplane.models.names_on_demand()]
        objects += [_text_object(name, model) for name, model in self._others.by_name.items()]
        return [each for each in objects if principal.may_use(each.id)]

    def one(self, name: str, principal: Principal) -> ModelObject:
        """Raises ModelNotFoundError, NotReadyError, PermissionDeniedError."""
        found = self._found(name)
        principal.require_model(name)
        return found

    def _found(self, name: str) -> ModelObject:
        pooling = dict(self._pooling.loaded_names()).get(name)
        if pooling is not None:
            return _pooling_object(name, pooling)
        if name in self._others.by_name:
            return _text_object(name, self._others.by_name[name])
        if name in self._dataplane.models.names_on_demand():
            return _unloaded(name)
        return _model_object(self._dataplane.model(name))


class ModelList:
    def __init__(self, objects: ModelObjects) -> None:
        self._objects = objects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        data = self._objects.all(exchange.context.principal)
        await exchange.respond(200, msgspec.json.encode({"object": "list", "data": data}))


class ModelDetail:
    """The id is all of the path after /v1/models/: names may hold slashes."""

    def __init__(self, objects: ModelObjects) -> None:
        self._objects = objects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        found = self._objects.one(scope["path_params"]["name"], exchange.context.principal)
        await exchange.respond(200, msgspec.json.encode(found))


def _unloaded(name: str) -> ModelObject:
    return ModelObject(name, 0, name, None, None, [])


def _model_object(model: ServedModel) -> ModelObject:
    length = model.info.context_length
    return ModelObject(model.name, model.created, model.root, length, model.parent, model.capabilities)


def _pooling_object(name: str, model: PoolingModel) -> ModelObject:
    return ModelObject(name, model.created, model.root, model.source.info.max_tokens, None, model.capabilities)


_CAPABILITIES = {"chat": "chat", "completions": "completion", "embeddings": "embedding"}
"""By what a model can be asked by."""


def _text_object(name: str, model: TextModel) -> ModelObject:
    capabilities = [_CAPABILITIES[api] for api in model.apis]
    return ModelObject(name, model.created, model.root, None, None, capabilities, owned_by="upstream")
