"""Batches in the database, with the results of their lines."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from penstock.engines.errors import NotFoundError, OverloadedError
from penstock.gateway.apis.batches.file_store import Room
from penstock.gateway.apis.batches.lines import BatchLine, least_result
from penstock.gateway.database import Database

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
OPEN: frozenset[Status] = frozenset({"validating", "in_progress", "finalizing", "cancelling"})
BATCH_PREFIX, MESSAGE_BATCH_PREFIX = "batch_", "msgbatch_"
_MOMENTS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class StoredBatch(msgspec.Struct, kw_only=True):
    id: str
    """The prefix of its API and 32 hexadecimal digits."""
    tenant: str
    key: str = ""
    """Which of its keys it was: lines count as that one's."""
    models: tuple[str, ...] | None
    """Those that its tenant's key may use; None: all."""
    endpoint: str
    input_file_id: str
    window_s: float
    """Seconds that it may take: OpenAI's `completion_window`."""
    metadata: dict[str, str] | None = None
    output_lifetime: float | None = None
    """Seconds after which what it has written is deleted."""
    created: float = msgspec.field(default_factory=time.time)
    status: Status = "validating"
    moments: dict[str, float] = {}
    """When it came to each status."""
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: list[dict[str, Any]] = []
    """What is wrong with its input."""
    output_file_id: str | None = None
    error_file_id: str | None = None
    validated: bool = False
    """Its input was read, and there is room for its results."""
    unanswered: int | None = None
    """Lines that had no answer when its files were written; None: that is not known yet."""
    volatile: bool = False
    """It is gone when the server ends."""
    ends_as: Literal["completed", "expired"] = "completed"
    """Decided before its files are written, so that it is the same after a restart."""

    @property
    def is_of_messages(self) -> bool:
        """Of Anthropic's API; the other ones are of OpenAI's."""
        return self.id.startswith(MESSAGE_BATCH_PREFIX)

    @property
    def is_open(self) -> bool:
        return self.status in OPEN

    @property
    def expires(self) -> float:
        return self.created + self.window_s

    @property
    def last_change(self) -> float:
        return max(self.moments.values(), default=self.created)

    def enter(self, status: Status) -> None:
        self.status = status
        self.moments[status] = time.time()

    def shown(self) -> dict[str, object]:
        """https://platform.openai.com/docs/api-reference/batch/object"""
        moments = {f"{name}_at": self.moments.get(name) for name in _MOMENTS}
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": None,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": f"{self.window_s / 3600:g}h",
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": int(self.created),
            "expires_at": int(self.expires),
            **{name: None if moment is None else int(moment) for name, moment in moments.items()},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
            **({"volatile": True} if self.volatile else {}),
        }


_SCHEMA = """
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, open INTEGER NOT NULL, batch BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS open_batches ON batches (open, created);
CREATE INDEX IF NOT EXISTS batches_of_tenant ON batches (tenant, open, created);
CREATE TABLE IF NOT EXISTS results (
    batch TEXT NOT NULL, line INTEGER NOT NULL, failed INTEGER NOT NULL, result BLOB NOT NULL,
    PRIMARY KEY (batch, line)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS deaths (
    batch TEXT NOT NULL, line INTEGER NOT NULL, count INTEGER NOT NULL, PRIMARY KEY (batch, line)
) WITHOUT ROWID;
"""
"""A line of a batch has one result: its key sees to that."""

_FORGET_OLDEST = """
DELETE FROM batches WHERE id IN (
    SELECT id FROM batches WHERE tenant = ? AND open = 0 ORDER BY created DESC LIMIT -1 OFFSET ?
)
"""
_MOST_ENDED_OF_TENANT = 10_000
"""As many as files: a batch that fails takes no room beside its own, which nothing else bounds on a disk."""
_MOST_ENDED_IN_MEMORY = 100
"""Of a tenant. They may have tens of KiB each, and must leave room for files."""

_decode = msgspec.json.Decoder(StoredBatch).decode


class BatchStore:
    """A batch belongs to its tenant; for others it does not exist."""

    def __init__(self, database: Database, room: Room, most_open: int, most_open_of_tenant: int) -> None:
        """`most_open` batches that have not ended, of all tenants. Raises sqlite3.Error."""
        database.create(_SCHEMA)
        self._database = database
        self._room = room
        self._most_open = most_open
        self._most_open_of_tenant = most_open_of_tenant

    async def add(self, batch: StoredBatch) -> None:
        """The oldest ones that have ended may be forgotten. Raises OverloadedError."""

        def insert(connection: sqlite3.Connection) -> None:
            query = "SELECT count(*), coalesce(sum(tenant = ?), 0) FROM batches WHERE open"
            everybodys, own = connection.execute(query, (batch.tenant,)).fetchone()
            if everybodys >= self._most_open or own >= self._most_open_of_tenant:
                message = "Too many batches have not ended: wait for some of them, or cancel one."
                raise OverloadedError(message, retry_after=60)
            encoded = msgspec.json.encode(batch)
            row = (batch.id, batch.tenant, batch.created, True, encoded)
            connection.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?)", row)
            most_ended = _MOST_ENDED_IN_MEMORY if self._room.volatile else _MOST_ENDED_OF_TENANT
            connection.execute(_FORGET_OLDEST, (batch.tenant, most_ended))
            self._room.hold_entry(connection, batch.tenant, batch.id, encoded)
            self._room.release_deleted(connection)

        await self._database.run(insert)

    async def save(self, batch: StoredBatch) -> None:
        """How far it is now. The results of one that has ended are in its files, and are forgotten here."""
        encoded, is_open = msgspec.json.encode(batch), batch.is_open

        def update(connection: sqlite3.Connection) -> None:
            row = (is_open, encoded, batch.id)
            connection.execute("UPDATE batches SET open = ?, batch = ? WHERE id = ?", row)
            if not is_open:
                for table in ("results", "deaths"):
                    connection.execute(f"DELETE FROM {table} WHERE batch = ?", (batch.id,))
                self._room.hold_entry(connection, batch.tenant, batch.id, encoded)

        await self._database.run(update)

    async def delete(self, batch_id: str) -> None:
        """One that has ended."""

        def delete(connection: sqlite3.Connection) -> None:
            connection.execute("DELETE FROM batches WHERE id = ?", (batch_id,))
            self._room.release_deleted(connection)

        await self._database.run(delete)

    async def find(self, tenant: str, batch_id: str, prefix: str = "") -> StoredBatch:
        """Its id begins with `prefix`. Raises NotFoundError."""

        def select(connection: sqlite3.Connection) -> tuple[bytes] | None:
            rows = connection.execute("SELECT batch FROM batches WHERE id = ? AND tenant = ?", (batch_id, tenant))
            row: tuple[bytes] | None = rows.fetchone()
            return row

        row = await self._database.run(select)
        if row is None or not batch_id.startswith(prefix):
            raise NotFoundError("There is no batch with this id.", param="batch_id")
        return _decode(row[0])

    async def ids(self, tenant: str, prefix: str) -> list[str]:
        """Of all its batches whose ids begin so, the oldest first."""

        def select(connection: sqlite3.Connection) -> list[tuple[str]]:
            query = "SELECT id FROM batches WHERE tenant = ? ORDER BY created, id"
            return connection.execute(query, (tenant,)).fetchall()

        return [row[0] for row in await self._database.run(select) if row[0].startswith(prefix)]

    async def find_all(self, tenant: str, batch_ids: Sequence[str]) -> list[StoredBatch]:
        """Each of these that is still there."""

        def select(connection: sqlite3.Connection) -> list[tuple[bytes]]:
            query = "SELECT batch FROM batches WHERE id = ? AND tenant = ?"
            return [row for batch_id in batch_ids for row in connection.execute(query, (batch_id, tenant)).fetchall()]

        return [_decode(row[0]) for row in await self._database.run(select)]

    async def open(self) -> list[StoredBatch]:
        """Those of all tenants that have not ended, the oldest first."""

        def select(connection: sqlite3.Connection) -> list[tuple[bytes]]:
            return connection.execute("SELECT batch FROM batches WHERE open ORDER BY created, id").fetchall()

        return [_decode(row[0]) for row in await self._database.run(select)]

    async def inputs_in_use(self) -> frozenset[str]:
        """The files that open batches read, also those that nobody has gone on with yet."""
        return frozenset(batch.input_file_id for batch in await self.open())

    async def delete_ended(self, before: float) -> None:
        """Forgets the batches that ended before this time."""

        def delete(connection: sqlite3.Connection) -> None:
            rows = connection.execute("SELECT id, batch FROM batches WHERE NOT open AND created < ?", (before,))
            old = [(batch_id,) for batch_id, encoded in rows if _decode(encoded).last_change < before]
            connection.executemany("DELETE FROM batches WHERE id = ?", old)
            self._room.release_deleted(connection)

        await self._database.run(delete)

    async def reserve(self, batch: StoredBatch, result_bytes: int) -> bool:
        """Room for results that take at least so many bytes. False: there is none."""

        def hold(connection: sqlite3.Connection) -> bool:
            has_room = not self._room.volatile or self._room.has(connection, batch.tenant, 2 * result_bytes)
            if has_room:
                self._room.hold(connection, batch.tenant, batch.id, 2 * result_bytes)
            return has_room

        return await self._database.run(hold)

    async def keep_results(
        self, batch: StoredBatch, results: Sequence[tuple[BatchLine, bytes]], *, failed: bool
    ) -> bool:
        """One that a line has already stays. False: there is no room for these, and none is kept; those of `unanswered`
        always have room."""
        rows = [(batch.id, line.number, failed, result) for line, result in results]
        more = 2 * sum(max(0, len(result) - least_result(line)) for line, result in results)

        def insert(connection: sqlite3.Connection) -> bool:
            if more and self._room.volatile and not self._room.has(connection, batch.tenant, more):
                return False
            connection.executemany("INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)", rows)
            self._room.hold(connection, batch.tenant, batch.id, more)
            return True

        return await self._database.run(insert)

    async def count_death(self, batch_id: str, line: int) -> None:
        """Another engine has died that worked on this line."""

        def count(connection: sqlite3.Connection) -> None:
            query = "INSERT INTO deaths VALUES (?, ?, 1) ON CONFLICT DO UPDATE SET count = count + 1"
            connection.execute(query, (batch_id, line))

        await self._database.run(count)

    async def deaths(self, batch_id: str) -> dict[int, int]:
        """Of engines, by the line that they worked on."""

        def select(connection: sqlite3.Connection) -> dict[int, int]:
            return dict(connection.execute("SELECT line, count FROM deaths WHERE batch = ?", (batch_id,)).fetchall())

        return await self._database.run(select)

    async def answered(self, batch_id: str) -> dict[int, bool]:
        """The lines with results, each with whether it failed."""

        def select(connection: sqlite3.Connection) -> dict[int, bool]:
            rows = connection.execute("SELECT line, failed FROM results WHERE batch = ?", (batch_id,))
            return {line: bool(failed) for line, failed in rows}

        return await self._database.run(select)

    async def results(self, batch_id: str, after: int, count: int, *, failed: bool) -> list[tuple[int, bytes]]:
        """At most `count` lines behind the line `after`, in order, with their results."""

        def select(connection: sqlite3.Connection) -> list[tuple[int, bytes]]:
            query = "SELECT line, result FROM results WHERE batch = ? AND line > ? AND failed = ? ORDER BY line LIMIT ?"
            return connection.execute(query, (batch_id, after, failed, count)).fetchall()

        return await self._database.run(select)
