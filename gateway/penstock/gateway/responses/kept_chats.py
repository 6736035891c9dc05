"""Kept chats: https://platform.openai.com/docs/api-reference/chat/list."""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.errors import HttpError
from penstock.gateway.generating.bodies import parse
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.http.pages import page
from penstock.gateway.openai.metadata import check_metadata
from penstock.gateway.openai.stored_chat import ID_PREFIX
from penstock.gateway.responses.chat_store import ChatStore
from penstock.gateway.responses.kept_responses import DEFAULT_PAGE, LONGEST_PAGE

_METADATA = re.compile(r"metadata\[(.*)\]", re.DOTALL)
_MAX_BODY = 64 << 10
_ELSEWHERE = {
    "batch": " For many chats at once, see POST /v1/batches.",
    "input_tokens": " POST /tokenize and POST /v1/responses/input_tokens count the tokens of a prompt.",
}


class UpdateChat(msgspec.Struct):
    metadata: dict[str, str] | None


class KeptChats:
    """Answers about them, as JSON, by the tenant that they belong to and the id in the path."""

    def __init__(self, store: ChatStore) -> None:
        self._store = store

    async def list_all(self, exchange: Exchange, kept_id: str, tenant: str) -> bytes:
        """A page of them, the oldest first unless `order` is desc: all, those of a model, or those with some
        metadata."""
        query = exchange.query
        model, metadata = query.get("model"), _asked_metadata(query)
        ids = [
            {"id": entry.id}
            for entry in await self._store.entries(tenant)
            if model in (None, entry.model) and metadata.items() <= entry.metadata.items()
        ]
        found = page(ids, query, default=DEFAULT_PAGE, most=LONGEST_PAGE, order="asc")
        bodies = await self._store.find_all([each["id"] for each in found["data"]], tenant)
        return msgspec.json.encode(found | {"data": [msgspec.Raw(body) for body in bodies]})

    async def get(self, exchange: Exchange, kept_id: str, tenant: str) -> bytes:
        return await self._store.find(kept_id, tenant)

    async def update(self, exchange: Exchange, kept_id: str, tenant: str) -> bytes:
        if not kept_id.startswith(ID_PREFIX):
            raise _no_route(kept_id)
        metadata = parse(await exchange.body(_MAX_BODY), UpdateChat, {}).metadata or {}
        check_metadata(metadata)
        await self._store.update(kept_id, tenant, metadata)
        return await self._store.find(kept_id, tenant)

    async def delete(self, exchange: Exchange, kept_id: str, tenant: str) -> bytes:
        await self._store.delete(kept_id, tenant)
        return msgspec.json.encode({"object": "chat.completion.deleted", "id": kept_id, "deleted": True})

    async def messages(self, exchange: Exchange, kept_id: str, tenant: str) -> bytes:
        """A page of the request's messages, the first one first unless `order` is desc."""
        messages = await self._store.messages(kept_id, tenant)
        query = exchange.query
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
