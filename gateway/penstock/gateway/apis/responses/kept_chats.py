"""Kept chats: https://platform.openai.com/docs/api-reference/chat/list."""

from __future__ import annotations

import logging
import re
import sqlite3
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.engines.errors import InvalidRequestError, NotFoundError
from penstock.gateway.apis.openai.chat import ID_PREFIX, StoredChat
from penstock.gateway.apis.openai.validation import check_metadata, with_metadata
from penstock.gateway.apis.responses.bounds import OVERHEAD, Kept, ResponseBounds
from penstock.gateway.apis.responses.schemas import DEFAULT_PAGE, LONGEST_PAGE
from penstock.gateway.database import Database
from penstock.gateway.errors import HttpError
from penstock.gateway.generating.request_reading import parse
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.pages import page

logger = logging.getLogger("penstock")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS chats (
    place INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, created REAL NOT NULL,
    used INTEGER NOT NULL, bytes INTEGER NOT NULL, model TEXT NOT NULL, metadata BLOB NOT NULL,
    completion BLOB NOT NULL, messages BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS chats_by_use ON chats (tenant, used, bytes);
"""
_OF_TENANT = "id = ? AND tenant = ?"

_encode = msgspec.json.Encoder().encode


class ChatEntry(NamedTuple):
    id: str
    model: str
    metadata: Mapping[str, str]


class ChatStore:
    """A chat belongs to its tenant; for others it does not exist. What is not found raises NotFoundError."""

    def __init__(self, database: Database, bounds: ResponseBounds) -> None:
        """Raises sqlite3.Error."""
        self._database = database
        self._bounds = bounds
        self._kept = Kept("chats", _forget)
        database.create(_SCHEMA)

    @property
    def enabled(self) -> bool:
        return self._bounds.most > 0

    def keep(self, tenant: str, chat: StoredChat) -> None:
        """From now on it is found, and the one that was not used for longest may be gone."""
        metadata = _encode(chat.metadata)
        size = len(chat.completion) + len(chat.messages) + len(metadata) + OVERHEAD
        if size > self._bounds.most_bytes_each:
            logger.warning("chat %s is too large to be kept", chat.id)
            return

        def insert(connection: sqlite3.Connection) -> None:
            values = (chat.id, tenant, time.time(), time.time_ns(), size, chat.model, metadata)
            columns = "id, tenant, created, used, bytes, model, metadata, completion, messages"
            row = (*values, chat.completion, chat.messages)
            connection.execute(f"INSERT INTO chats ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            self._kept.make_room(connection, tenant, self._bounds)

        self._database.submit(insert, f"chat {chat.id} could not be kept")

    async def find(self, chat_id: str, tenant: str) -> bytes:
        """JSON of the answer."""
        completion, metadata = await self._row(chat_id, tenant, "completion, metadata")
        return with_metadata(completion, msgspec.json.decode(metadata))

    async def messages(self, chat_id: str, tenant: str) -> list[dict[str, Any]]:
        """Those of the request, the first one first."""
        [messages] = await self._row(chat_id, tenant, "messages")
        decoded: list[dict[str, Any]] = msgspec.json.decode(messages)
        return decoded

    async def entries(self, tenant: str) -> list[ChatEntry]:
        """Of all chats, the oldest first."""

        def select(connection: sqlite3.Connection) -> list[tuple[str, str, bytes]]:
            query = "SELECT id, model, metadata FROM chats WHERE tenant = ? ORDER BY place"
            return connection.execute(query, (tenant,)).fetchall()

        rows = await self._database.run(select)
        return [ChatEntry(chat_id, model, msgspec.json.decode(metadata)) for chat_id, model, metadata in rows]

    async def find_all(self, chat_ids: Sequence[str], tenant: str) -> list[bytes]:
        """JSON of each of these that is still there."""

        def select(connection: sqlite3.Connection) -> list[tuple[bytes, bytes]]:
            query = f"SELECT completion, metadata FROM chats WHERE {_OF_TENANT}"
            return [row for chat_id in chat_ids for row in connection.execute(query, (chat_id, tenant)).fetchall()]

        rows = await self._database.run(select)
        return [with_metadata(completion, msgspec.json.decode(metadata)) for completion, metadata in rows]

    async def update(self, chat_id: str, tenant: str, metadata: Mapping[str, str]) -> None:
        encoded = _encode(metadata)

        def update(connection: sqlite3.Connection) -> int:
            query = f"UPDATE chats SET bytes = bytes - length(metadata) + ?, metadata = ? WHERE {_OF_TENANT}"
            return connection.execute(query, (len(encoded), encoded, chat_id, tenant)).rowcount

        _check_found(await self._database.run(update))

    async def delete(self, chat_id: str, tenant: str) -> None:
        def delete(connection: sqlite3.Connection) -> int:
            return connection.execute(f"DELETE FROM chats WHERE {_OF_TENANT}", (chat_id, tenant)).rowcount

        _check_found(await self._database.run(delete))

    async def delete_old(self, before: float) -> None:
        """Forgets those that were made before this time."""

        def delete(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM chats WHERE created < ?", (before,))

        await self._database.run(delete)

    async def _row(self, chat_id: str, tenant: str, columns: str) -> tuple[bytes, ...]:
        def select(connection: sqlite3.Connection) -> tuple[bytes, ...] | None:
            of_chat = (chat_id, tenant)
            connection.execute(f"UPDATE chats SET used = ? WHERE {_OF_TENANT}", (time.time_ns(), *of_chat))
            rows = connection.execute(f"SELECT {columns} FROM chats WHERE {_OF_TENANT}", of_chat)
            row: tuple[bytes, ...] | None = rows.fetchone()
            return row

        row = await self._database.run(select)
        _check_found(row is not None)
        return row or ()


def _forget(connection: sqlite3.Connection, chat_id: str) -> None:
    connection.execute("DELETE FROM chats WHERE id = ?", (chat_id,))


def _check_found(is_kept: object) -> None:
    if not is_kept:
        raise NotFoundError("There is no stored chat with this id.", param="completion_id")


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
        listing = page(ids, query, default=DEFAULT_PAGE, most=LONGEST_PAGE, order="asc")
        bodies = await self._store.find_all([entry["id"] for entry in listing["data"]], tenant)
        return msgspec.json.encode(listing | {"data": [msgspec.Raw(body) for body in bodies]})

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
    texts = {name: value for name, value in query.items() if name.startswith("metadata")}
    metadata = {match[1]: value for name, value in texts.items() if (match := _METADATA.fullmatch(name))}
    if len(metadata) < len(texts):
        raise InvalidRequestError("metadata is asked for as metadata[key]=value.", param="metadata")
    return metadata
