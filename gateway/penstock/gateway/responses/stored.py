"""What was kept of earlier responses: GET, DELETE and cancel of /v1/responses/{id}, and its input items."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.http.exchange import SCOPE_KEY, Exchange
from penstock.gateway.http.pages import page
from penstock.gateway.responses.chat_request import check_include
from penstock.gateway.responses.store import ResponseStore, StoredResponse

_DEFAULT_LIMIT, _MAX_LIMIT = 20, 100


class _Endpoint(ABC):
    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        request = Request(scope)
        response_id, tenant = request.path_params["response_id"], exchange.context.tenant
        stored = self._store.get(response_id, tenant)
        check_include(request.query_params.getlist("include") + request.query_params.getlist("include[]"))
        await exchange.respond(200, self._answer(response_id, stored, request.query_params))

    @abstractmethod
    def _answer(self, response_id: str, stored: StoredResponse, query: Mapping[str, str]) -> bytes:
        """JSON. Raises PenstockError."""


class GetResponse(_Endpoint):
    def _answer(self, response_id: str, stored: StoredResponse, query: Mapping[str, str]) -> bytes:
        if query.get("stream") not in (None, "false"):
            raise UnsupportedError("stream: only a response that is being made has a stream.", param="stream")
        return stored.response


class DeleteResponse(_Endpoint):
    def _answer(self, response_id: str, stored: StoredResponse, query: Mapping[str, str]) -> bytes:
        self._store.delete(response_id, stored.tenant)
        return msgspec.json.encode({"id": response_id, "object": "response", "deleted": True})


class CancelResponse(_Endpoint):
    def _answer(self, response_id: str, stored: StoredResponse, query: Mapping[str, str]) -> bytes:
        message = "Only responses in the background can be cancelled. Close the connection to end another one."
        raise InvalidRequestError(message, param="response_id")


class InputItems(_Endpoint):
    """A page of them, the newest first unless `order` is asc."""

    def _answer(self, response_id: str, stored: StoredResponse, query: Mapping[str, str]) -> bytes:
        return msgspec.json.encode(page(stored.input_items(), query, default=_DEFAULT_LIMIT, most=_MAX_LIMIT))
