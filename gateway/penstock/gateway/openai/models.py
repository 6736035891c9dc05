"""GET /v1/models and /v1/models/{id}, and loading and unloading as Triton's OpenAI front end has it."""

from __future__ import annotations

import time
from collections.abc import Awaitable

import msgspec
from starlette.types import Receive, Scope, Send

from penstock.engines.errors import InvalidRequestError, ModelNotFoundError
from penstock.gateway.front.context import Principal
from penstock.gateway.http.exchange import SCOPE_KEY, Exchange
from penstock.gateway.http.text_models import TextModel, TextModels
from penstock.gateway.kserve.store import ModelStore, NotExplicitError
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
        objects += [_text_object(name, model) for name, model in self._others.listed().items()]
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
        others = self._others.listed()
        if name in others:
            return _text_object(name, others[name])
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


class LoadModel:
    """POST /v1/models/{id}/load, where models are loaded by request: the answer comes when the model is ready."""

    def __init__(self, models: ModelStore, objects: ModelObjects) -> None:
        self._models = models
        self._objects = objects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        name = scope["path_params"]["name"]
        with exchange.call():
            if self._models.versions(name):
                raise InvalidRequestError(f"The model `{name[:64]}` is already loaded.", param="model")
            await _explicitly(self._models.load(name))
            try:
                found = self._objects.one(name, exchange.context.principal)
            except ModelNotFoundError:  # a model that this API cannot ask
                found = msgspec.structs.replace(_unloaded(name), created=int(time.time()))
            await exchange.respond(200, msgspec.json.encode(found))


class UnloadModel:
    """POST /v1/models/{id}/unload: new requests are refused from then on, what runs goes on."""

    def __init__(self, models: ModelStore) -> None:
        self._models = models

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        name = scope["path_params"]["name"]
        with exchange.call():
            loaded = bool(self._models.versions(name))
            await _explicitly(self._models.unload(name))
            if not loaded:
                raise ModelNotFoundError(f"Unknown model: {name[:64]}")
            await exchange.respond(200, msgspec.json.encode({"status": "success", "model": name}))


async def _explicitly(change: Awaitable[None]) -> None:
    """Without explicit control KServe's answer is 503, as Triton's; clients of this API would try that again."""
    try:
        await change
    except NotExplicitError:
        raise InvalidRequestError("Loading and unloading models needs --model-control-mode=explicit.") from None


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
    return ModelObject(name, model.created, model.root, None, None, capabilities, owned_by=model.owner)
