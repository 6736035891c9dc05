"""Chats that clients asked to keep."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.engines.errors import NotFoundError
from penstock.gateway.database import Database
from penstock.gateway.openai.metadata import with_metadata
from penstock.gateway.openai.stored_chat import StoredChat
from penstock.gateway.responses.bounds import OVERHEAD, Bounds, Kept

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

    def __init__(self, database: Database, bounds: Bounds) -> None:
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
        found: list[dict[str, Any]] = msgspec.json.decode(messages)
        return found

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
            found = connection.execute(f"SELECT {columns} FROM chats WHERE {_OF_TENANT}", of_chat)
            row: tuple[bytes, ...] | None = found.fetchone()
            return row

        row = await self._database.run(select)
        _check_found(row is not None)
        return row or ()


def _forget(connection: sqlite3.Connection, chat_id: str) -> None:
    connection.execute("DELETE FROM chats WHERE id = ?", (chat_id,))


def _check_found(found: object) -> None:
    if not found:
        raise NotFoundError("There is no stored chat with this id.", param="completion_id")
