"""Chats that were kept: https://platform.openai.com/docs/api-reference/chat/list."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from starlette.requests import Request

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.errors import HttpError
from penstock.gateway.generating.bodies import parse
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.http.pages import QUERY, page
from penstock.gateway.openai.metadata import check_metadata
from penstock.gateway.openai.stored_chat import ID_PREFIX
from penstock.gateway.responses.chat_store import ChatStore
from penstock.gateway.responses.response_routes import DEFAULT_PAGE, LONGEST_PAGE
from penstock.gateway.responses.stored_endpoint import StoredEndpoint

_METADATA = re.compile(r"metadata\[(.*)\]", re.DOTALL)
_MAX_BODY = 64 << 10
_ELSEWHERE = {
    "batch": " For many chats at once, see POST /v1/batches.",
    "input_tokens": " POST /tokenize and POST /v1/responses/input_tokens count the tokens of a prompt.",
}


class _UpdateChat(msgspec.Struct):
    metadata: dict[str, str] | None


class _Endpoint(StoredEndpoint):
    kept, id_name = "chats", "completion_id"

    def __init__(self, store: ChatStore) -> None:
        super().__init__(store.enabled)
        self._store = store


class ListChats(_Endpoint):
    """A page of them, the oldest first unless `order` is desc: all, those of a model, or those with some metadata."""

    query = (*QUERY, "model", "metadata")

    async def _answer(self, exchange: Exchange, kept_id: str, tenant: str) -> bytes:
        query = Request(exchange.scope).query_params
        model, metadata = query.get("model"), _asked_metadata(query)
        ids = [
            {"id": entry.id}
            for entry in await self._store.entries(tenant)
            if model in (None, entry.model) and metadata.items() <= entry.metadata.items()
        ]
        found = page(ids, query, default=DEFAULT_PAGE, most=LONGEST_PAGE, order="asc")
        bodies = await self._store.find_all([each["id"] for each in found["data"]], tenant)
        return msgspec.json.encode(found | {"data": [msgspec.Raw(body) for body in bodies]})


class GetChat(_Endpoint):
    async def _answer(self, exchange: Exchange, kept_id: str, tenant: str) -> bytes:
        return await self._store.find(kept_id, tenant)


class UpdateChat(_Endpoint):
    schema = _UpdateChat

    async def _answer(self, exchange: Exchange, kept_id: str, tenant: str) -> bytes:
        if not kept_id.startswith(ID_PREFIX):
            raise _no_route(kept_id)
        metadata = parse(await exchange.body(_MAX_BODY), self.schema, {}).metadata or {}
        check_metadata(metadata)
        await self._store.update(kept_id, tenant, metadata)
        return await self._store.find(kept_id, tenant)


class DeleteChat(_Endpoint):
    async def _answer(self, exchange: Exchange, kept_id: str, tenant: str) -> bytes:
        await self._store.delete(kept_id, tenant)
        return msgspec.json.encode({"object": "chat.completion.deleted", "id": kept_id, "deleted": True})


class ChatMessages(_Endpoint):
    """A page of the request's messages, the first one first unless `order` is desc."""

    query = QUERY

    async def _answer(self, exchange: Exchange, kept_id: str, tenant: str) -> bytes:
        messages = await self._store.messages(kept_id, tenant)
        query = Request(exchange.scope).query_params
        return msgspec.json.encode(page(messages, query, default=DEFAULT_PAGE, most=LONGEST_PAGE, order="asc"))


def _no_route(name: str) -> HttpError:
    """What other servers have below chats, and this one somewhere else."""
    hint = _ELSEWHERE.get(name, "")
    return HttpError(404, f"No such route: POST /v1/chat/completions/{name[:64]}.{hint}", code="route_not_found")


def _asked_metadata(query: Mapping[str, str]) -> dict[str, str]:
    """Of `metadata[key]=value`. Raises InvalidRequestError."""
    given = {name: value for name, value in query.items() if name.startswith("metadata")}
    found = {match[1]: value for name, value in given.items() if (match := _METADATA.fullmatch(name))}
    if len(found) < len(given):
        raise InvalidRequestError("metadata is asked for as metadata[key]=value.", param="metadata")
    return found
