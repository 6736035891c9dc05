"""What is known of files and batches, in an SQLite database that survives the process, kill -9 included."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL,
    created REAL NOT NULL, expires REAL
);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, open INTEGER NOT NULL, batch BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS open_batches ON batches (open, created);
CREATE TABLE IF NOT EXISTS results (
    batch TEXT NOT NULL, line INTEGER NOT NULL, failed INTEGER NOT NULL, result BLOB NOT NULL,
    PRIMARY KEY (batch, line)
) WITHOUT ROWID;
"""
"""A line of a batch has one result: its key sees to that."""

_T = TypeVar("_T")


class Database:
    """All work on it is done by one thread, in the order in which it was asked for; the event loop never waits for the
    disk."""

    def __init__(self, path: Path) -> None:
        """Raises sqlite3.Error when this is no database, or another server has it open."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="files")
        self._connection = self._thread.submit(_connect, path).result()

    async def run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """What `work` returns; all that it changes is there at once, or nothing of it when it raises. It must return no
        cursor: a thread that drops one disturbs what this one does."""
        return await asyncio.wrap_future(self._thread.submit(self._in_transaction, work))

    def _in_transaction(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        with self._connection:
            return work(self._connection)

    def close(self) -> None:
        """After what was asked for is done."""
        self._thread.submit(self._connection.close)
        self._thread.shutdown()


def is_disk_error(error: Exception) -> bool:
    """Whether it may be gone when the same is tried again: a full disk, a folder that does not answer."""
    if isinstance(error, ExceptionGroup):
        return all(is_disk_error(each) for each in error.exceptions)
    return isinstance(error, OSError | sqlite3.OperationalError) and not isinstance(error, FileNotFoundError)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=1)
    connection.execute("PRAGMA locking_mode=EXCLUSIVE")  # a second server would answer the same lines
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.executescript(_SCHEMA)
    connection.execute("BEGIN IMMEDIATE")
    connection.commit()
    return connection
