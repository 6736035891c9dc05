"""Responses that are kept for a while, each with those that it goes on from."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError, NotFoundError
from penstock.gateway.apis.responses.bounds import OVERHEAD, Kept, ResponseBounds
from penstock.gateway.apis.responses.items import id_in_message, response_of
from penstock.gateway.apis.responses.schemas import InputItem
from penstock.gateway.database import Database


class _Answer(msgspec.Struct):
    output: list[InputItem]


def output_of(response: bytes) -> list[InputItem]:
    """The output of a response, which is JSON."""
    return msgspec.json.decode(response, type=_Answer).output


@dataclass(frozen=True, slots=True, eq=False)
class StoredResponse:
    """As it was when it was asked for, whatever is deleted meanwhile."""

    id: str
    links: Sequence[tuple[bytes, bytes]]
    """JSON of the input items and of the response object: of all responses up to this one, the first one first."""
    size: int
    """Bytes that they count together."""

    @property
    def response(self) -> dict[str, Any]:
        decoded: dict[str, Any] = msgspec.json.decode(self.links[-1][1])
        return decoded

    def conversation(self) -> list[InputItem]:
        """All items up to this response, the first ones first."""
        items_decoder, answers = msgspec.json.Decoder(list[InputItem]), msgspec.json.Decoder(_Answer)
        return [
            item
            for items, response in self.links
            for some in (items_decoder.decode(items), answers.decode(response).output)
            for item in some
        ]

    def shown_conversation(self) -> list[dict[str, Any]]:
        """The same as it is shown."""
        return self.input_items() + list(self.response["output"])

    def input_items(self) -> list[dict[str, Any]]:
        """Those of the conversation before the response's output, as they are shown."""
        *earlier, (own, _) = self.links
        items_before: list[dict[str, Any]] = []
        for items, response in earlier:
            items_before += msgspec.json.decode(items) + msgspec.json.decode(response)["output"]
        return items_before + list(msgspec.json.decode(own))


_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, used INTEGER NOT NULL, shown INTEGER NOT NULL,
    open INTEGER NOT NULL, previous TEXT, bytes INTEGER NOT NULL, response BLOB NOT NULL, input BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS responses_by_use ON responses (tenant, shown, open, used, bytes);
CREATE INDEX IF NOT EXISTS responses_by_previous ON responses (previous);
"""
"""`shown` 0: deleted, and still read by those that have gone on from it. `open`: in the background, and not ended."""
_OF_TENANT = "id = ? AND tenant = ? AND shown"
_CHAIN = f"""
WITH RECURSIVE chain (id, previous, distance) AS (
    SELECT id, previous, 0 FROM responses WHERE {_OF_TENANT}
    UNION ALL
    SELECT responses.id, responses.previous, distance + 1 FROM chain JOIN responses ON responses.id = chain.previous
)
SELECT input, response, bytes, open FROM chain JOIN responses USING (id) ORDER BY distance DESC
"""
_STOPPED = "The server was stopped before this response had ended."

_encode = msgspec.json.Encoder().encode


class ResponseStore:
    """A response belongs to its tenant; for others it does not exist."""

    def __init__(self, database: Database, bounds: ResponseBounds) -> None:
        """What a stopped server has left open has failed. Raises sqlite3.Error."""
        self._database = database
        self._bounds = bounds
        self._kept = Kept("responses", _forget, counted="shown", loose="shown AND NOT open")
        self._ends: dict[str, bytes] = {}
        """Of responses that the database may not know to have ended: a full disk refuses that. Of its thread."""
        database.create(_SCHEMA)
        database.prepare(_fail_open_ones)

    @property
    def enabled(self) -> bool:
        return self._bounds.most > 0

    def fits(self, size: int, previous: StoredResponse | None) -> bool:
        """Whether a response whose JSON, with that of its input items, has so many bytes is small enough to be kept.
        Those before it count: they stay for as long as it does."""
        return size + OVERHEAD + (0 if previous is None else previous.size) <= self._bounds.most_bytes_each

    def keep(
        self,
        tenant: str,
        response_id: str,
        body: bytes,
        items: bytes,
        previous: StoredResponse | None,
        *,
        is_open: bool = False,
    ) -> Future[None]:
        """From now on it is found, and the one that was not used for longest may be gone. `body` is JSON of the
        response object, `items` of the input's."""

        def insert(connection: sqlite3.Connection) -> None:
            before, row_items = None if previous is None else previous.id, items
            if previous is not None and not _exists(connection, previous.id):
                before, row_items = None, _encode(previous.shown_conversation() + msgspec.json.decode(items))
            size = len(body) + len(row_items) + OVERHEAD
            row = (response_id, tenant, time.time(), time.time_ns(), True, is_open, before, size, body, row_items)
            connection.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            self._kept.make_room(connection, tenant, self._bounds)

        return self._database.submit(insert, f"response {response_id} could not be kept")

    def end(self, tenant: str, response_id: str, body: bytes) -> Future[None]:
        """One that was open has ended."""

        def update(connection: sqlite3.Connection) -> None:
            self._ends[response_id] = body
            self._write_ends(connection)
            self._kept.make_room(connection, tenant, self._bounds)

        return self._database.submit(update, f"the end of response {response_id} could not be kept")

    def _write_ends(self, connection: sqlite3.Connection) -> None:
        """Once more where the disk has refused them: otherwise they would be open for ever."""
        what = "open = 0, bytes = bytes - length(response) + ?, response = ?"
        query = f"UPDATE responses SET {what} WHERE id = ? AND open"
        for response_id, body in tuple(self._ends.items()):
            if not connection.execute(query, (len(body), body, response_id)).rowcount:  # it was written, or has gone
                del self._ends[response_id]

    async def find(self, response_id: str, tenant: str) -> bytes:
        """JSON of the response object. Raises NotFoundError."""

        def select(connection: sqlite3.Connection) -> tuple[bytes] | None:
            self._write_ends(connection)
            _use(connection, response_id, tenant)
            query = f"SELECT response FROM responses WHERE {_OF_TENANT}"
            row: tuple[bytes] | None = connection.execute(query, (response_id, tenant)).fetchone()
            return row

        row = await self._database.run(select)
        if row is None:
            raise _not_found(response_id)
        return row[0]

    async def get(self, response_id: str, tenant: str, param: str = "response_id") -> StoredResponse:
        """One that has ended. Raises NotFoundError, InvalidRequestError; `param` is the caller's field."""

        def select(connection: sqlite3.Connection) -> list[tuple[bytes, bytes, int, int]]:
            self._write_ends(connection)
            _use(connection, response_id, tenant)
            return connection.execute(_CHAIN, (response_id, tenant)).fetchall()

        rows = await self._database.run(select)
        if not rows:
            raise _not_found(response_id, param)
        if rows[-1][3]:
            raise InvalidRequestError("This response is still being made.", param=param)
        return StoredResponse(response_id, [row[:2] for row in rows], sum(row[2] for row in rows))

    async def output_items(self, item_ids: Iterable[str], tenant: str) -> dict[str, InputItem]:
        """Those of the tenant's responses that have ended, by their ids."""
        ids = set(item_ids)

        def select(connection: sqlite3.Connection) -> dict[str, InputItem]:
            query = f"SELECT response FROM responses WHERE {_OF_TENANT} AND NOT open"
            items: dict[str, InputItem] = {}
            for response_id in {response_of(item_id) for item_id in ids}:
                for (body,) in connection.execute(query, (response_id, tenant)).fetchall():
                    _use(connection, response_id, tenant)
                    items |= {item.id: item for item in output_of(body) if item.id is not None and item.id in ids}
            return items

        return await self._database.run(select)

    async def delete(self, response_id: str, tenant: str) -> None:
        """What has gone on from it keeps what it needs. Raises NotFoundError."""

        def delete(connection: sqlite3.Connection) -> bool:
            query = f"SELECT 1 FROM responses WHERE {_OF_TENANT}"
            is_kept = connection.execute(query, (response_id, tenant)).fetchone() is not None
            if is_kept:
                _forget(connection, response_id)
            return is_kept

        if not await self._database.run(delete):
            raise _not_found(response_id)

    async def delete_old(self, before: float) -> None:
        """Forgets those that were made before this time."""

        def delete(connection: sqlite3.Connection) -> None:
            self._write_ends(connection)
            query = "SELECT id FROM responses WHERE shown AND NOT open AND created < ?"
            for (response_id,) in connection.execute(query, (before,)).fetchall():
                _forget(connection, response_id)

        await self._database.run(delete)


def _use(connection: sqlite3.Connection, response_id: str, tenant: str) -> None:
    connection.execute(f"UPDATE responses SET used = ? WHERE {_OF_TENANT}", (time.time_ns(), response_id, tenant))


def _exists(connection: sqlite3.Connection, response_id: str) -> bool:
    return connection.execute("SELECT 1 FROM responses WHERE id = ?", (response_id,)).fetchone() is not None


def _forget(connection: sqlite3.Connection, response_id: str) -> None:
    """It is not found any more. Its row goes as soon as no other response goes on from it, and with it those before
    it that are only there for its sake."""
    connection.execute("UPDATE responses SET shown = 0 WHERE id = ?", (response_id,))
    unused = "NOT shown AND NOT EXISTS (SELECT 1 FROM responses AS later WHERE later.previous = responses.id)"
    query = f"SELECT previous FROM responses WHERE id = ? AND {unused}"
    linked_id: str | None = response_id
    while linked_id is not None and (row := connection.execute(query, (linked_id,)).fetchone()) is not None:
        connection.execute("DELETE FROM responses WHERE id = ?", (linked_id,))
        linked_id = row[0]


def _fail_open_ones(connection: sqlite3.Connection) -> None:
    for response_id, body in connection.execute("SELECT id, response FROM responses WHERE open").fetchall():
        error = {"code": "server_error", "message": _STOPPED}
        failed = _encode(msgspec.json.decode(body) | {"status": "failed", "error": error})
        query = "UPDATE responses SET open = 0, response = ? WHERE id = ?"
        connection.execute(query, (failed, response_id))


def _not_found(response_id: str, param: str = "response_id") -> NotFoundError:
    return NotFoundError(f"There is no response with the id '{id_in_message(response_id)}'.", param=param)
