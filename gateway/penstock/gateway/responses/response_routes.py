"""What was kept of earlier responses: GET, DELETE and cancel of /v1/responses/{id}, and its input items."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.http.exchange import SCOPE_KEY, Exchange
from penstock.gateway.http.pages import QUERY, page
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.responses.event_log import send_events
from penstock.gateway.responses.include import ENCRYPTED_REASONING, Include
from penstock.gateway.responses.service import ResponseService

DEFAULT_PAGE, LONGEST_PAGE = 20, 100
_LONGEST_NUMBER = 9


class _Endpoint(ABC):
    def __init__(self, responses: ResponseService) -> None:
        self._store = responses.store
        self._background = responses.background

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        query = checked_query(exchange)
        await exchange.respond(200, await self._answer(scope["path_params"]["response_id"], exchange, query))

    @abstractmethod
    async def _answer(self, response_id: str, exchange: Exchange, query: Mapping[str, str]) -> bytes:
        """JSON. Raises PenstockError."""

    async def _find(self, response_id: str, tenant: str) -> bytes:
        """JSON of the response object, as it is now. Raises NotFoundError."""
        under_way = self._background.find(response_id, tenant)
        if under_way is not None:
            return msgspec.json.encode(under_way.shown())
        return await self._store.find(response_id, tenant)


class GetResponse(_Endpoint):
    """The response, or the events of one that was begun in the background."""

    query = ("stream", "starting_after", "include")

    def __init__(self, responses: ResponseService, settings: AppSettings) -> None:
        super().__init__(responses)
        self._heartbeat_s = settings.heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope[SCOPE_KEY]
        query = checked_query(exchange)
        if not _wants_stream(query):
            await super().__call__(scope, receive, send)
            return
        after = _starting_after(query.get("starting_after"))
        response_id, tenant = scope["path_params"]["response_id"], exchange.context.tenant
        await self._find(response_id, tenant)
        log = self._background.log(response_id, tenant)
        if log is None:
            message = "stream: only responses that were begun with background and stream have events, for some time."
            raise UnsupportedError(message, param="stream")
        with exchange.call() as call:
            call.watch()
            await send_events(exchange, log, after, self._heartbeat_s)

    async def _answer(self, response_id: str, exchange: Exchange, query: Mapping[str, str]) -> bytes:
        if "starting_after" in query:
            raise InvalidRequestError("starting_after needs stream.", param="starting_after")
        return await self._find(response_id, exchange.context.tenant)


class DeleteResponse(_Endpoint):
    async def _answer(self, response_id: str, exchange: Exchange, query: Mapping[str, str]) -> bytes:
        tenant = exchange.context.tenant
        under_way = self._background.find(response_id, tenant)
        if under_way is not None:
            await self._background.cancel(under_way)
        await self._store.delete(response_id, tenant)
        self._background.forget(response_id)
        return msgspec.json.encode({"id": response_id, "object": "response", "deleted": True})


class CancelResponse(_Endpoint):
    async def _answer(self, response_id: str, exchange: Exchange, query: Mapping[str, str]) -> bytes:
        tenant = exchange.context.tenant
        under_way = self._background.find(response_id, tenant)
        if under_way is not None:
            await self._background.cancel(under_way)
        found = await self._store.find(response_id, tenant)
        if not msgspec.json.decode(found)["background"]:
            message = "Only responses in the background can be cancelled. Close the connection to end another one."
            raise InvalidRequestError(message, param="response_id")
        return found


class InputItems(_Endpoint):
    """A page of them, the newest first unless `order` is asc."""

    query = (*QUERY, "include")

    async def _answer(self, response_id: str, exchange: Exchange, query: Mapping[str, str]) -> bytes:
        stored = await self._store.get(response_id, exchange.context.tenant)
        return msgspec.json.encode(page(stored.input_items(), query, default=DEFAULT_PAGE, most=LONGEST_PAGE))


def checked_query(exchange: Exchange) -> Mapping[str, str]:
    """Raises InvalidRequestError, UnsupportedError."""
    query = Request(exchange.scope).query_params
    include = Include.parse(query.getlist("include") + query.getlist("include[]"), exchange.context)
    if include.encrypted_reasoning:
        exchange.context.ignore("include", f"{ENCRYPTED_REASONING} is only for requests that make a response.")
    if query.get("include_obfuscation", "false") != "false":
        raise UnsupportedError("include_obfuscation is not supported.", param="include_obfuscation")
    return query


def _wants_stream(query: Mapping[str, str]) -> bool:
    """Raises InvalidRequestError."""
    given = query.get("stream", "false")
    if given not in ("true", "false"):
        raise InvalidRequestError("stream must be true or false.", param="stream")
    return given == "true"


def _starting_after(given: str | None) -> int:
    """-1: from the beginning. Raises InvalidRequestError."""
    if given is None:
        return -1
    if not (given.isdecimal() and given.isascii() and len(given) <= _LONGEST_NUMBER):
        raise InvalidRequestError("starting_after must be the number of an event.", param="starting_after")
    return int(given)
