"""Routes of Ollama's API."""

from __future__ import annotations

from functools import partial

from penstock.gateway.apis.ollama.embed import Embed, OldEmbed
from penstock.gateway.apis.ollama.errors import OLLAMA
from penstock.gateway.apis.ollama.generate import Generate, OllamaChat
from penstock.gateway.apis.ollama.models import (
    OllamaModels,
    Pull,
    operators_only,
    show,
    show_all,
    show_running,
    show_version,
)
from penstock.gateway.apis.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest, PullRequest, ShowRequest
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.models.pooling.plane import PoolingPlane
from penstock.gateway.requests.access import INFER, SEE_METADATA
from penstock.gateway.transports.http.routes import Route
from penstock.gateway.transports.http.settings import AppSettings


def text_routes(dataplane: DataPlane, settings: AppSettings) -> list[Route]:
    chat, generate = OllamaChat(dataplane, settings).handle, Generate(dataplane, settings).handle
    return [
        Route("POST", "/api/chat", INFER, chat, OLLAMA, schema=OllamaChatRequest),
        Route("POST", "/api/generate", INFER, generate, OLLAMA, schema=OllamaGenerateRequest),
    ]


def embedding_routes(pooling: PoolingPlane, settings: AppSettings) -> list[Route]:
    embed, old = Embed(pooling, settings), OldEmbed(pooling, settings)
    refused = Embed.unsupported
    return [
        Route("POST", "/api/embed", INFER, embed.handle, OLLAMA, schema=Embed.schema, refused=refused),
        Route("POST", "/api/embeddings", INFER, old.handle, OLLAMA, schema=OldEmbed.schema, refused=refused),
    ]


def model_routes(catalogue: Catalogue, settings: AppSettings) -> list[Route]:
    models = OllamaModels(catalogue)
    shown, pull = partial(show, models, settings), Pull(models, settings).handle
    return [
        Route("GET", "/api/tags", SEE_METADATA, partial(show_all, models), OLLAMA),
        Route("GET", "/api/ps", SEE_METADATA, partial(show_running, models), OLLAMA),
        Route("POST", "/api/show", SEE_METADATA, shown, OLLAMA, schema=ShowRequest),
        Route("GET", "/api/version", SEE_METADATA, partial(show_version, settings), OLLAMA),
        Route("POST", "/api/pull", SEE_METADATA, pull, OLLAMA, schema=PullRequest),
        *(
            Route(method, f"/api/{name}", SEE_METADATA, operators_only, OLLAMA)
            for name, method in (("create", "POST"), ("copy", "POST"), ("push", "POST"), ("delete", "DELETE"))
        ),
    ]
