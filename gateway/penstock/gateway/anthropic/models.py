"""GET /v1/models and /v1/models/{id} for Anthropic's clients: https://docs.claude.com/en/api/models-list."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.gateway.anthropic.errors import is_of_anthropic
from penstock.gateway.front.context import Principal
from penstock.gateway.http.exchange import SCOPE_KEY, Exchange
from penstock.gateway.http.pages import ids_between

_DEFAULT, _MOST = 20, 1000
"""Of a page, as in Anthropic's API."""


class Model(Protocol):
    id: str
    created: int
    """Unix seconds; 0: not known."""
    max_model_len: int | None


class Models(Protocol):
    def all(self, principal: Principal) -> Sequence[Model]: ...

    def one(self, name: str, principal: Principal) -> Model:
        """Raises PenstockError."""
        ...


class _ForAnthropic(ABC):
    """Answers Anthropic's clients, and has `other` answer all others."""

    def __init__(self, models: Models, other: ASGIApp) -> None:
        self._models = models
        self._other = other

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        if not is_of_anthropic(exchange.headers):
            await self._other(scope, receive, send)
            return
        await exchange.respond(200, msgspec.json.encode(self._answer(scope, exchange.context.principal)))

    @abstractmethod
    def _answer(self, scope: Scope, principal: Principal) -> dict[str, Any]:
        """Raises PenstockError."""


class ModelPage(_ForAnthropic):
    query = ("limit", "after_id", "before_id")

    def _answer(self, scope: Scope, principal: Principal) -> dict[str, Any]:
        models = [_shown(model) for model in self._models.all(principal)]
        return model_page(models, Request(scope).query_params)


class ModelDetail(_ForAnthropic):
    """The id is all of the path after /v1/models/."""

    def _answer(self, scope: Scope, principal: Principal) -> dict[str, Any]:
        return _shown(self._models.one(scope["path_params"]["name"], principal))


def model_page(models: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """The models behind `after_id`, or those that end before `before_id`. Raises InvalidRequestError."""
    by_id = {model["id"]: model for model in models}
    ids, has_more = ids_between(list(by_id), query, default=_DEFAULT, most=_MOST)
    ends = {"first_id": ids[0], "last_id": ids[-1]} if ids else {"first_id": None, "last_id": None}
    return {"data": [by_id[each] for each in ids], "has_more": has_more, **ends}


def _shown(model: Model) -> dict[str, Any]:
    created = datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    limits = {"max_input_tokens": model.max_model_len, "max_tokens": model.max_model_len}
    about = {"type": "model", "id": model.id, "display_name": model.id, "created_at": created}
    return {**about, "lifecycle": "active", **limits}
