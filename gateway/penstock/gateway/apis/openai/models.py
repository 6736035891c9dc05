"""Models as the OpenAI API shows them; loading and unloading them as Triton's front end has it; their adapters and
engines as vLLM's server has them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from penstock.engines.errors import InvalidRequestError, ModelNotFoundError, UnsupportedError
from penstock.gateway.apis.kserve.store import ModelStore, NotExplicitError
from penstock.gateway.errors import HttpError
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.models.entries import Served
from penstock.gateway.models.language.adapter_control import AdapterControl
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.models.language.models import LoadedModel, NameHolder
from penstock.gateway.models.pooling.model import PoolingModel
from penstock.gateway.requests.bounded_json import decode_json
from penstock.gateway.requests.context import Principal
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.settings import AppSettings


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

    def __init__(self, models: Catalogue) -> None:
        self._models = models

    def all(self, principal: Principal) -> list[ModelObject]:
        return [_model_object(name, served) for name, served in self._models.listed() if principal.may_use(name)]

    def one(self, name: str, principal: Principal) -> ModelObject:
        """Raises ModelNotFoundError, NotReadyError, PermissionDeniedError."""
        model = _model_object(name, self._models.first(name))
        principal.require_model(name)
        return model

    async def show_all(self, exchange: Exchange) -> None:
        data = self.all(exchange.context.principal)
        await exchange.respond(200, msgspec.json.encode({"object": "list", "data": data}))

    async def show(self, exchange: Exchange) -> None:
        """The id is all of the path after /v1/models/: names may hold slashes."""
        await exchange.respond(200, msgspec.json.encode(self.one(exchange.names["name"], exchange.context.principal)))


class ModelControl:
    """Loading and unloading by request."""

    def __init__(self, models: ModelStore, objects: ModelObjects) -> None:
        self._models = models
        self._objects = objects

    async def load(self, exchange: Exchange) -> None:
        """The answer comes when the model is ready."""
        name = exchange.names["name"]
        with exchange.call():
            if self._models.versions(name):
                raise InvalidRequestError(f"The model `{name[:64]}` is already loaded.", param="model")
            await _explicitly(self._models.load(name))
            try:
                loaded = self._objects.one(name, exchange.context.principal)
            except ModelNotFoundError:  # a model that this API cannot ask
                loaded = msgspec.structs.replace(_unloaded(name), created=int(time.time()))
            await exchange.respond(200, msgspec.json.encode(loaded))

    async def unload(self, exchange: Exchange) -> None:
        """New requests are refused from then on, what runs goes on."""
        name = exchange.names["name"]
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


def _model_object(name: str, served: Served | None) -> ModelObject:
    if served is None:
        return _unloaded(name)
    if isinstance(served, PoolingModel):
        length = served.source.info.max_tokens
        return ModelObject(name, served.created, served.root, length, None, served.capabilities)
    if isinstance(served, NameHolder):
        model = served.describe(name)
        length = model.info.context_length
        return ModelObject(name, model.created, model.root, length, model.parent, model.capabilities)
    capabilities = [_CAPABILITIES[api] for api in served.apis]
    return ModelObject(name, served.created, served.root, None, None, capabilities, owned_by=served.owner)


_CAPABILITIES = {"chat": "chat", "completions": "completion", "embeddings": "embedding"}
"""By what a model can be asked by."""


# POST /sleep, /wake_up and /reset_prefix_cache, and GET /is_sleeping, as vLLM's server has them.
#
# Each acts on all language models, or on the one that `?model=` names.

_LEVELS = ("1", "2")
_MODES = ("abort", "wait")

Act = Callable[[Sequence[LoadedModel], Mapping[str, str]], Awaitable[bytes]]
"""What is done to models, as the query says. Gives the answer's body. Raises PenstockError."""


async def control(dataplane: DataPlane, act: Act, takes: Sequence[str], exchange: Exchange) -> None:
    """`takes`: names in the query."""
    query = dict(exchange.query)
    for name in query.keys() - set(takes):
        raise InvalidRequestError(f"{name[:64]} is not supported here.", param=name[:64])
    if "model" in query:
        exchange.context.principal.require_model(query["model"])
        models = [dataplane.models.own_language(query["model"]).model]
    else:
        models = [model for _, model in dataplane.models.loaded()]
    with exchange.call() as call:
        call.watch()
        await exchange.respond(200, await act(models, query))


async def reset_prefix_cache(models: Sequence[LoadedModel], query: Mapping[str, str]) -> bytes:
    for model in models:
        if not model.sleep.asleep:  # else there is nothing left to forget
            await model.engine.reset_prefix_cache()
    return b""


async def sleep(models: Sequence[LoadedModel], query: Mapping[str, str]) -> bytes:
    level, mode = query.get("level", "1"), query.get("mode", "abort")
    if level not in _LEVELS:
        raise InvalidRequestError("level must be 1 or 2.", param="level")
    if mode not in _MODES:
        raise InvalidRequestError("mode must be abort or wait.", param="mode")
    await asyncio.gather(*(model.sleep.sleep(wait=mode == "wait") for model in models))
    return b""


async def wake_up(models: Sequence[LoadedModel], query: Mapping[str, str]) -> bytes:
    for model in models:  # one after the other: each finds out what the others leave of the memory
        await model.sleep.wake()
    return b""


async def is_sleeping(models: Sequence[LoadedModel], query: Mapping[str, str]) -> bytes:
    return msgspec.json.encode({"is_sleeping": bool(models) and all(model.sleep.asleep for model in models)})


_TEXT = b"text/plain; charset=utf-8"


class LoadRequest(msgspec.Struct):
    lora_name: str
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False


class UnloadRequest(msgspec.Struct):
    lora_name: str


_R = TypeVar("_R", LoadRequest, UnloadRequest)


async def load_adapter(adapters: AdapterControl, settings: AppSettings, exchange: Exchange) -> None:
    with exchange.call() as call:
        request = await _read(exchange, adapters, settings, LoadRequest)
        if request.is_3d_lora_weight:
            raise UnsupportedError("is_3d_lora_weight is not supported.", param="is_3d_lora_weight")
        call.watch()
        await adapters.load(
            request.lora_name, request.lora_path, base=request.base_model_name, replace=request.load_inplace
        )
        await _say(exchange, f"Success: LoRA adapter '{request.lora_name}' added successfully.")


async def unload_adapter(adapters: AdapterControl, settings: AppSettings, exchange: Exchange) -> None:
    with exchange.call() as call:
        request = await _read(exchange, adapters, settings, UnloadRequest)
        call.watch()
        await adapters.unload(request.lora_name)
        await _say(exchange, f"Success: LoRA adapter '{request.lora_name}' removed successfully.")


async def _read(exchange: Exchange, adapters: AdapterControl, settings: AppSettings, kind: type[_R]) -> _R:
    """The body. Raises HttpError 403 on a server whose adapters stay as they are, InvalidRequestError."""
    if not adapters.allowed:
        message = "Adapters can be loaded and unloaded only on a server that was started with --lora-directory."
        raise HttpError(403, message, code="lora_directory_not_set")
    body = await exchange.body(settings.max_body_bytes)
    return decode_json(body, kind)


async def _say(exchange: Exchange, text: str) -> None:
    """vLLM answers with a line of text."""
    await exchange.respond(200, text.encode(), content_type=_TEXT)
