"""The room that tenants have for files, and in memory for everything that batches keep."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from penstock.engines.errors import OverloadedError
from penstock.gateway.database import Database

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL,
    created REAL NOT NULL, expires REAL
);
CREATE INDEX IF NOT EXISTS sizes_of_files ON files (tenant, bytes);
CREATE INDEX IF NOT EXISTS ends_of_files ON files (expires);
CREATE TABLE IF NOT EXISTS held (batch TEXT PRIMARY KEY, tenant TEXT NOT NULL, bytes INTEGER NOT NULL);
"""
_SUMS = """
SELECT coalesce(sum(size), 0), coalesce(sum((tenant = :tenant) * size), 0) FROM (
    SELECT tenant, sum(bytes + :entry) AS size FROM files GROUP BY tenant
    UNION ALL SELECT tenant, sum(bytes) FROM held GROUP BY tenant
)
"""
_ENTRY = 1024
"""Bytes that a file or a batch takes in memory beside what is counted of it."""


@dataclass(frozen=True, slots=True)
class FileBounds:
    bytes: int
    """Of all files together, those that batches have written included."""
    bytes_of_tenant: int
    files_of_tenant: int
    retention: float | None
    """Seconds after which every file is deleted; None: never."""


class Room:
    """Its methods are parts of transactions. In memory, batches have a bound as well: their own entries count, and the
    results of an open one twice, since they are written into files at its end. On a disk only files count, and results
    are written in any case."""

    def __init__(self, database: Database, bounds: FileBounds, *, volatile: bool) -> None:
        """`volatile`: all is in memory. Raises sqlite3.Error."""
        database.create(_SCHEMA)
        self.bounds = bounds
        self.volatile = volatile

    def check(self, connection: sqlite3.Connection, tenant: str, files: int, size: int) -> None:
        """Whether the tenant could add so many files, of so many bytes. Raises OverloadedError."""
        query = "SELECT count(*) FROM files WHERE tenant = ?"
        [count] = connection.execute(query, (tenant,)).fetchone()
        if count + files > self.bounds.files_of_tenant:
            raise OverloadedError(f"You have {count} files: delete some first.")
        if not self.has(connection, tenant, size):
            setting = "--data-memory, or --data-dir for files on a disk" if self.volatile else "--data-size"
            raise OverloadedError(f"There is no room for this file: delete others first ({setting}).")

    def has(self, connection: sqlite3.Connection, tenant: str, size: int) -> bool:
        entry = _ENTRY if self.volatile else 0
        held, of_tenant = connection.execute(_SUMS, {"tenant": tenant, "entry": entry}).fetchone()
        bounds = self.bounds
        return bool(held + size <= bounds.bytes and of_tenant + size <= bounds.bytes_of_tenant)

    def hold(self, connection: sqlite3.Connection, tenant: str, batch_id: str, size: int) -> None:
        """So many more bytes of a batch, whether there is room for them or not."""
        if self.volatile:
            query = "INSERT INTO held VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes"
            connection.execute(query, (batch_id, tenant, size))

    def hold_entry(self, connection: sqlite3.Connection, tenant: str, batch_id: str, entry: bytes) -> None:
        """All that is kept of the batch from now on."""
        connection.execute("DELETE FROM held WHERE batch = ?", (batch_id,))
        self.hold(connection, tenant, batch_id, len(entry) + _ENTRY)

    def release_deleted(self, connection: sqlite3.Connection) -> None:
        """What batches held that are no longer there."""
        connection.execute("DELETE FROM held WHERE batch NOT IN (SELECT id FROM batches)")
