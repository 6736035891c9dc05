"""Conversations: https://platform.openai.com/docs/api-reference/conversations."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError, NotFoundError
from penstock.gateway.apis.openai.validation import check_metadata
from penstock.gateway.apis.responses.bounds import OVERHEAD, Kept, ResponseBounds
from penstock.gateway.apis.responses.items import fresh_item_id, id_in_message, input_items, new_id, shown_item
from penstock.gateway.apis.responses.schemas import DEFAULT_PAGE, LONGEST_PAGE, GivenItem, InputItem, checked_query
from penstock.gateway.database import Database
from penstock.gateway.generating.request_reading import parse
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.pages import page

_SCHEMA = """
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, used INTEGER NOT NULL, bytes INTEGER NOT NULL,
    metadata BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS conversations_by_use ON conversations (tenant, used, bytes);
CREATE TABLE IF NOT EXISTS conversation_items (
    place INTEGER PRIMARY KEY AUTOINCREMENT, conversation TEXT NOT NULL, id TEXT NOT NULL, item BLOB NOT NULL,
    UNIQUE (conversation, id)
);
CREATE INDEX IF NOT EXISTS conversation_items_by_id ON conversation_items (id);
"""
_ITEM_OVERHEAD = 256

_encode = msgspec.json.Encoder().encode

Item = Mapping[str, Any]
"""As it is shown."""


class ConversationStore:
    """A conversation belongs to its tenant; for others it does not exist. What is not found raises NotFoundError."""

    def __init__(self, database: Database, bounds: ResponseBounds) -> None:
        """Raises sqlite3.Error."""
        self._database = database
        self._bounds = bounds
        self._kept = Kept("conversations", _forget)
        database.create(_SCHEMA)

    async def create(self, tenant: str, metadata: Mapping[str, str], items: Sequence[Item]) -> dict[str, Any]:
        """The conversation object. Raises InvalidRequestError when the items are too large."""
        conversation_id = new_id("conv")

        def insert(connection: sqlite3.Connection) -> dict[str, Any]:
            row = (conversation_id, tenant, time.time(), time.time_ns(), OVERHEAD, _encode(metadata))
            connection.execute("INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?)", row)
            self._add(connection, conversation_id, tenant, items)
            return _shown(_use(connection, conversation_id, tenant))

        return await self._database.run(insert)

    async def find(self, conversation_id: str, tenant: str) -> dict[str, Any]:
        """The conversation object."""
        return _shown(await self._database.run(lambda connection: _use(connection, conversation_id, tenant)))

    async def update(self, conversation_id: str, tenant: str, metadata: Mapping[str, str]) -> dict[str, Any]:
        """The conversation object, with other metadata."""

        def update(connection: sqlite3.Connection) -> dict[str, Any]:
            _use(connection, conversation_id, tenant)
            query = "UPDATE conversations SET metadata = ? WHERE id = ?"
            connection.execute(query, (_encode(metadata), conversation_id))
            return _shown(_use(connection, conversation_id, tenant))

        return await self._database.run(update)

    async def delete(self, conversation_id: str, tenant: str) -> None:
        def delete(connection: sqlite3.Connection) -> None:
            _use(connection, conversation_id, tenant)
            _forget(connection, conversation_id)

        await self._database.run(delete)

    async def items(self, conversation_id: str, tenant: str, param: str = "conversation_id") -> bytes:
        """JSON of all of them, the oldest first."""

        def select(connection: sqlite3.Connection) -> list[tuple[bytes]]:
            _use(connection, conversation_id, tenant, param)
            query = "SELECT item FROM conversation_items WHERE conversation = ? ORDER BY place"
            return connection.execute(query, (conversation_id,)).fetchall()

        return b"[" + b",".join([row[0] for row in await self._database.run(select)]) + b"]"

    async def earlier_items(self, conversation_id: str, tenant: str, more: int) -> list[InputItem]:
        """What a request goes on from. Raises InvalidRequestError where there is no room for so many bytes more."""
        encoded = await self.items(conversation_id, tenant, "conversation")
        if len(encoded) + more > self._bounds.most_bytes_each:
            raise self._too_large("conversation")
        return msgspec.json.decode(encoded, type=list[InputItem])

    async def item(self, conversation_id: str, tenant: str, item_id: str) -> bytes:
        """Its JSON."""

        def select(connection: sqlite3.Connection) -> bytes:
            _use(connection, conversation_id, tenant)
            return _item(connection, conversation_id, item_id)

        return await self._database.run(select)

    async def kept_items(self, item_ids: Iterable[str], tenant: str) -> dict[str, InputItem]:
        """Those of the tenant's conversations, by their ids; of several with one id, the newest one."""

        def select(connection: sqlite3.Connection) -> dict[str, InputItem]:
            query = (
                "SELECT item FROM conversation_items AS items JOIN conversations ON conversations.id = conversation "
                "WHERE items.id = ? AND tenant = ? ORDER BY place DESC LIMIT 1"
            )
            rows = {item_id: connection.execute(query, (item_id, tenant)).fetchone() for item_id in item_ids}
            return {
                item_id: msgspec.json.decode(row[0], type=InputItem) for item_id, row in rows.items() if row is not None
            }

        return await self._database.run(select)

    async def add(self, conversation_id: str, tenant: str, items: Sequence[Item]) -> list[Item]:
        """Gives them as they are kept. Raises InvalidRequestError when they are too large."""

        def insert(connection: sqlite3.Connection) -> list[Item]:
            _use(connection, conversation_id, tenant)
            return self._add(connection, conversation_id, tenant, items)

        return await self._database.run(insert)

    def append(self, conversation_id: str, tenant: str, items: Sequence[Item]) -> None:
        """Adds what a response has brought, unless the conversation is gone. It is there for all calls from now on."""

        def insert(connection: sqlite3.Connection) -> None:
            try:
                _use(connection, conversation_id, tenant)
            except NotFoundError:
                return
            self._add(connection, conversation_id, tenant, items, bounded=False)

        self._database.submit(insert, f"a response could not be added to conversation {conversation_id}")

    async def delete_item(self, conversation_id: str, tenant: str, item_id: str) -> dict[str, Any]:
        """The conversation object."""

        def delete(connection: sqlite3.Connection) -> dict[str, Any]:
            row = _use(connection, conversation_id, tenant)
            size = len(_item(connection, conversation_id, item_id)) + _ITEM_OVERHEAD
            place = (conversation_id, item_id)
            connection.execute("DELETE FROM conversation_items WHERE conversation = ? AND id = ?", place)
            connection.execute("UPDATE conversations SET bytes = bytes - ? WHERE id = ?", (size, conversation_id))
            return _shown(row)

        return await self._database.run(delete)

    async def delete_old(self, before: float) -> None:
        """Forgets those that were not used since this time."""

        def delete(connection: sqlite3.Connection) -> None:
            query = "SELECT id FROM conversations WHERE used < ?"
            for (conversation_id,) in connection.execute(query, (int(before * 1e9),)).fetchall():
                _forget(connection, conversation_id)

        await self._database.run(delete)

    def _add(
        self,
        connection: sqlite3.Connection,
        conversation_id: str,
        tenant: str,
        items: Sequence[Item],
        *,
        bounded: bool = True,
    ) -> list[Item]:
        """An item whose id another one has gets one of its own."""
        query = "SELECT id FROM conversation_items WHERE conversation = ?"
        taken = {item_id for (item_id,) in connection.execute(query, (conversation_id,))}
        added: list[Item] = []
        for item in items:
            added.append(item if item["id"] not in taken else {**item, "id": fresh_item_id(item["type"])})
            taken.add(added[-1]["id"])
        rows = [(conversation_id, item["id"], _encode(item)) for item in added]
        query = "INSERT INTO conversation_items (conversation, id, item) VALUES (?, ?, ?)"
        connection.executemany(query, rows)
        size = sum(len(row[2]) + _ITEM_OVERHEAD for row in rows)
        connection.execute("UPDATE conversations SET bytes = bytes + ? WHERE id = ?", (size, conversation_id))
        query = "SELECT bytes FROM conversations WHERE id = ?"
        if bounded and connection.execute(query, (conversation_id,)).fetchone()[0] > self._bounds.most_bytes_each:
            raise self._too_large("items")
        self._kept.make_room(connection, tenant, self._bounds)
        return added

    def _too_large(self, param: str) -> InvalidRequestError:
        message = f"A conversation may have {self._bounds.most_bytes_each} bytes: begin another one, or delete items."
        return InvalidRequestError(message, param=param)


_Row = tuple[str, float, bytes]


def _use(connection: sqlite3.Connection, conversation_id: str, tenant: str, param: str = "conversation_id") -> _Row:
    """Its id, creation and metadata. `param` is the caller's field."""
    query = "SELECT id, created, metadata FROM conversations WHERE id = ? AND tenant = ?"
    row: _Row | None = connection.execute(query, (conversation_id, tenant)).fetchone()
    if row is None:
        message = f"There is no conversation with the id '{id_in_message(conversation_id)}'."
        raise NotFoundError(message, param=param)
    connection.execute("UPDATE conversations SET used = ? WHERE id = ?", (time.time_ns(), conversation_id))
    return row


def _item(connection: sqlite3.Connection, conversation_id: str, item_id: str) -> bytes:
    query = "SELECT item FROM conversation_items WHERE conversation = ? AND id = ?"
    row: tuple[bytes] | None = connection.execute(query, (conversation_id, item_id)).fetchone()
    if row is None:
        message = f"The conversation has no item with the id '{id_in_message(item_id)}'."
        raise NotFoundError(message, param="item_id")
    return row[0]


def _shown(row: _Row) -> dict[str, Any]:
    conversation_id, created, metadata = row
    return {
        "id": conversation_id,
        "object": "conversation",
        "created_at": int(created),
        "metadata": msgspec.json.decode(metadata),
    }


def _forget(connection: sqlite3.Connection, conversation_id: str) -> None:
    connection.execute("DELETE FROM conversation_items WHERE conversation = ?", (conversation_id,))
    connection.execute("DELETE FROM conversations WHERE id = ?", (conversation_id,))


_MOST_ITEMS = 20
"""Of one request, as in OpenAI's API."""


class CreateConversation(msgspec.Struct):
    metadata: dict[str, str] | None = None
    items: list[GivenItem] | None = None


class UpdateConversation(msgspec.Struct):
    metadata: dict[str, str] | None


class CreateItems(msgspec.Struct):
    items: list[GivenItem]


LookUp = Callable[[list[InputItem], str, str], Awaitable[list[InputItem]]]
"""Gives items with what is kept for a tenant in place of each reference; the text is the request's field."""


class Conversations:
    """Answers about them, as JSON, by the tenant that they belong to and the id in the path."""

    def __init__(self, store: ConversationStore, look_up: LookUp, max_body: int) -> None:
        """`max_body`: bytes that one may have."""
        self._store = store
        self._look_up = look_up
        self._max_body = max_body

    async def _body(self, exchange: Exchange) -> bytes:
        return await exchange.body(self._max_body)

    async def _checked(self, inputs: list[GivenItem], context: RequestContext) -> list[Item]:
        if len(inputs) > _MOST_ITEMS:
            raise InvalidRequestError(f"items: at most {_MOST_ITEMS} at a time.", param="items")
        items = await self._look_up(input_items(inputs, context, "items"), context.tenant, "items")
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
