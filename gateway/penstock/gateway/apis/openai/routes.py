"""Routes of the OpenAI API, and of vLLM's beside it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from penstock.gateway.apis.kserve.store import ModelStore
from penstock.gateway.apis.openai.chat import ChatCompletions, ChatKeeper
from penstock.gateway.apis.openai.completions import Completions
from penstock.gateway.apis.openai.models import (
    LoadRequest,
    ModelControl,
    ModelObjects,
    UnloadRequest,
    control,
    is_sleeping,
    load_adapter,
    reset_prefix_cache,
    sleep,
    unload_adapter,
    wake_up,
)
from penstock.gateway.apis.openai.schemas import CHAT, COMPLETION, ChatRequest, CompletionRequest
from penstock.gateway.apis.openai.tokenize import (
    TOKENIZE,
    Detokenize,
    DetokenizeRequest,
    Tokenize,
    TokenizeRequest,
    tokenizer_info,
)
from penstock.gateway.models.language.adapter_control import AdapterControl
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.requests.access import CHANGE_MODELS, INFER, SEE_METADATA
from penstock.gateway.transports.http.routes import SERVER, Route
from penstock.gateway.transports.http.settings import AppSettings

if TYPE_CHECKING:
    from penstock.gateway.generating.resumable_streams import ResumableStreams


def text_routes(
    dataplane: DataPlane,
    settings: AppSettings,
    keeper: ChatKeeper | None = None,
    resumable: ResumableStreams | None = None,
) -> list[Route]:
    """Without a keeper no chats are kept; without `resumable` streams end when their clients leave."""
    chat = ChatCompletions(dataplane, settings, keeper, resumable).handle
    completions = Completions(dataplane, settings, resumable).handle
    return [
        Route("POST", "/v1/chat/completions", INFER, chat, schema=ChatRequest, refused=CHAT),
        Route("POST", "/v1/completions", INFER, completions, schema=CompletionRequest, refused=COMPLETION),
    ]


def model_routes(objects: ModelObjects, store: ModelStore | None) -> list[Route]:
    """`store`: where models are loaded by request."""
    one = "/v1/models/{name:path}"
    routes = [
        Route("GET", "/v1/models", SEE_METADATA, objects.show_all),
        Route("GET", one, SEE_METADATA, objects.show),
    ]
    if store is not None:
        models = ModelControl(store, objects)
        routes += [
            Route("POST", f"{one}/load", CHANGE_MODELS, models.load),
            Route("POST", f"{one}/unload", CHANGE_MODELS, models.unload),
        ]
    return routes


def adapter_routes(dataplane: DataPlane, settings: AppSettings) -> list[Route]:
    adapters = AdapterControl(dataplane)
    load, unload = partial(load_adapter, adapters, settings), partial(unload_adapter, adapters, settings)
    return [
        Route("POST", "/v1/load_lora_adapter", CHANGE_MODELS, load, schema=LoadRequest),
        Route("POST", "/v1/unload_lora_adapter", CHANGE_MODELS, unload, schema=UnloadRequest),
    ]


def engine_routes(dataplane: DataPlane) -> list[Route]:
    rows = (
        ("POST", "/sleep", CHANGE_MODELS, sleep, ("model", "level", "mode")),
        ("POST", "/wake_up", CHANGE_MODELS, wake_up, ("model",)),
        ("GET", "/is_sleeping", SEE_METADATA, is_sleeping, ("model",)),
        ("POST", "/reset_prefix_cache", CHANGE_MODELS, reset_prefix_cache, ("model",)),
    )
    return [
        Route(method, path, access, partial(control, dataplane, act, query), SERVER, query=query)
        for method, path, access, act, query in rows
    ]


def token_routes(dataplane: DataPlane, settings: AppSettings) -> list[Route]:
    tokenize, detokenize = Tokenize(dataplane, settings).handle, Detokenize(dataplane, settings).handle
    info = partial(tokenizer_info, dataplane, settings)
    return [
        Route("POST", "/tokenize", INFER, tokenize, SERVER, schema=TokenizeRequest, refused=TOKENIZE),
        Route("POST", "/detokenize", INFER, detokenize, SERVER, schema=DetokenizeRequest),
        Route("GET", "/tokenizer_info", SEE_METADATA, info, SERVER, query=("model",)),
    ]
