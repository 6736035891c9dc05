"""Routes of the Messages API."""

from __future__ import annotations

from functools import partial

from penstock.gateway.apis.anthropic.errors import ANTHROPIC
from penstock.gateway.apis.anthropic.messages import CountTokens, Messages
from penstock.gateway.apis.anthropic.models import QUERY, ListedModels, show_model, show_models
from penstock.gateway.apis.anthropic.schemas import UNSUPPORTED, CountTokensRequest, MessagesRequest
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.requests.access import INFER, SEE_METADATA
from penstock.gateway.transports.http.routes import Route
from penstock.gateway.transports.http.settings import AppSettings

_OF_CLIENTS = b"anthropic-version"
"""The header by which Anthropic's clients are told from OpenAI's, where both have the same path."""


def message_routes(dataplane: DataPlane, settings: AppSettings) -> list[Route]:
    messages, count = Messages(dataplane, settings).handle, CountTokens(dataplane, settings).handle
    schemas = (("/v1/messages", messages, MessagesRequest), ("/v1/messages/count_tokens", count, CountTokensRequest))
    return [
        Route("POST", path, INFER, handle, ANTHROPIC, schema=schema, refused=UNSUPPORTED)
        for path, handle, schema in schemas
    ]


def model_routes(models: ListedModels) -> list[Route]:
    every, one = partial(show_models, models), partial(show_model, models)
    return [
        Route("GET", "/v1/models", SEE_METADATA, every, ANTHROPIC, _OF_CLIENTS, query=QUERY),
        Route("GET", "/v1/models/{name:path}", SEE_METADATA, one, ANTHROPIC, _OF_CLIENTS),
    ]
