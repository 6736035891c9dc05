"""GET /v1/models and /v1/models/{id} for Anthropic's clients: https://docs.claude.com/en/api/models-list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec

from penstock.gateway.requests.context import Principal
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.pages import ids_between

_DEFAULT, _MOST = 20, 1000
"""Of a page, as in Anthropic's API."""


class ListedModel(Protocol):
    id: str
    created: int
    """Unix seconds; 0: not known."""
    max_model_len: int | None


class ListedModels(Protocol):
    def all(self, principal: Principal) -> Sequence[ListedModel]: ...

    def one(self, name: str, principal: Principal) -> ListedModel:
        """Raises PenstockError."""
        ...


QUERY = ("limit", "after_id", "before_id")
"""Of a page."""


async def show_models(models: ListedModels, exchange: Exchange) -> None:
    shown = [_shown(model) for model in models.all(exchange.context.principal)]
    await exchange.respond(200, msgspec.json.encode(model_page(shown, exchange.query)))


async def show_model(models: ListedModels, exchange: Exchange) -> None:
    """The id is all of the path after /v1/models/. Raises PenstockError."""
    model = models.one(exchange.names["name"], exchange.context.principal)
    await exchange.respond(200, msgspec.json.encode(_shown(model)))


def model_page(models: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """The models behind `after_id`, or those that end before `before_id`. Raises InvalidRequestError."""
    by_id = {model["id"]: model for model in models}
    ids, has_more = ids_between(list(by_id), query, default=_DEFAULT, most=_MOST)
    ends = {"first_id": ids[0], "last_id": ids[-1]} if ids else {"first_id": None, "last_id": None}
    return {"data": [by_id[model_id] for model_id in ids], "has_more": has_more, **ends}


def _shown(model: ListedModel) -> dict[str, Any]:
    created = datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    limits = {"max_input_tokens": model.max_model_len, "max_tokens": model.max_model_len}
    about = {"type": "model", "id": model.id, "display_name": model.id, "created_at": created}
    return {**about, "lifecycle": "active", **limits}
