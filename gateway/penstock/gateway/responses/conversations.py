"""Conversations: https://platform.openai.com/docs/api-reference/conversations."""

from __future__ import annotations

import msgspec

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.front.context import RequestContext
from penstock.gateway.generating.bodies import parse
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.http.pages import page
from penstock.gateway.http.settings import AppSettings
from penstock.gateway.openai.metadata import check_metadata
from penstock.gateway.responses.conversation_store import ConversationStore, Item
from penstock.gateway.responses.items import input_items, shown_item
from penstock.gateway.responses.kept_responses import DEFAULT_PAGE, LONGEST_PAGE, checked_query
from penstock.gateway.responses.schemas import GivenItem
from penstock.gateway.responses.service import ResponseService

_MOST_ITEMS = 20
"""Of one request, as in OpenAI's API."""


class CreateConversation(msgspec.Struct):
    metadata: dict[str, str] | None = None
    items: list[GivenItem] | None = None


class UpdateConversation(msgspec.Struct):
    metadata: dict[str, str] | None


class CreateItems(msgspec.Struct):
    items: list[GivenItem]


class Conversations:
    """Answers about them, as JSON, by the tenant that they belong to and the id in the path."""

    def __init__(self, responses: ResponseService, settings: AppSettings) -> None:
        self._responses = responses
        self._store: ConversationStore = responses.conversations
        self._max_body = settings.max_body_bytes

    async def _body(self, exchange: Exchange) -> bytes:
        return await exchange.body(self._max_body)

    async def _checked(self, given: list[GivenItem], context: RequestContext) -> list[Item]:
        if len(given) > _MOST_ITEMS:
            raise InvalidRequestError(f"items: at most {_MOST_ITEMS} at a time.", param="items")
        items = await self._responses.looked_up(input_items(given, context, "items"), context.tenant, "items")
        return [shown_item(item) for item in items]

    async def create(self, exchange: Exchange, kept_id: str, tenant: str) -> bytes:
        request = parse(await self._body(exchange) or b"{}", CreateConversation, {})
        check_metadata(request.metadata)
        items = await self._checked(request.items, exchange.context) if request.items else []
        return msgspec.json.encode(await self._store.create(tenant, request.metadata or {}, items))

    async def get(self, exchange: Exchange, kept_id: str, tenant: str) -> bytes:
        return msgspec.json.encode(await self._store.find(kept_id, tenant))

    async def update(self, exchange: Exchange, kept_id: str, tenant: str) -> bytes:
        metadata = parse(await self._body(exchange), UpdateConversation, {}).metadata or {}
        check_metadata(metadata)
        return msgspec.json.encode(await self._store.update(kept_id, tenant, metadata))

    async def delete(self, exchange: Exchange, kept_id: str, tenant: str) -> bytes:
        await self._store.delete(kept_id, tenant)
        return msgspec.json.encode({"id": kept_id, "object": "conversation.deleted", "deleted": True})

    async def create_items(self, exchange: Exchange, kept_id: str, tenant: str) -> bytes:
        checked_query(exchange)
        request = parse(await self._body(exchange), CreateItems, {})
        items = await self._checked(request.items, exchange.context)
        added = await self._store.add(kept_id, tenant, items)
        return msgspec.json.encode(page(added, {}, default=_MOST_ITEMS, most=_MOST_ITEMS, order="asc"))

    async def list_items(self, exchange: Exchange, kept_id: str, tenant: str) -> bytes:
        query = checked_query(exchange)
        items = msgspec.json.decode(await self._store.items(kept_id, tenant))
        return msgspec.json.encode(page(items, query, default=DEFAULT_PAGE, most=LONGEST_PAGE))

    async def get_item(self, exchange: Exchange, kept_id: str, tenant: str) -> bytes:
        checked_query(exchange)
        return await self._store.item(kept_id, tenant, exchange.names["item_id"])

    async def delete_item(self, exchange: Exchange, kept_id: str, tenant: str) -> bytes:
        item_id = exchange.names["item_id"]
        return msgspec.json.encode(await self._store.delete_item(kept_id, tenant, item_id))
