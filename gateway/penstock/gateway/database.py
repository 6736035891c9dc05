"""The server's SQLite database: in a file that survives the process, kill -9 included, or in memory."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

logger = logging.getLogger("penstock")

_T = TypeVar("_T")

_MIGRATIONS = ("",)
"""Scripts: each brings a file of the version of its place to the next one. Files of version 0 are from before versions
were written. A change of tables, or of what a column holds, that an older server would not understand is a new one."""


class NewerSchemaError(Exception):
    """A newer server has written the file."""


class Database:
    """All work on it is done by one thread, in the order in which it was asked for; the event loop never waits for the
    disk."""

    def __init__(self, path: Path | None) -> None:
        """None: in memory. Raises OSError, NewerSchemaError, sqlite3.Error when this is no database, or another server
        has it open."""
        self._connection = _connect(":memory:" if path is None else path)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="database")

    def create(self, tables: str) -> None:
        """Before any other work is asked for. Raises sqlite3.Error."""
        self._connection.executescript(tables)

    def prepare(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """As `run`, at once and by the caller's thread: before any other work is asked for. Raises sqlite3.Error."""
        return self._in_transaction(work)

    async def run(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """What `work` returns; all that it changes is there at once, or nothing of it when it raises. It must return no
        cursor: a thread that drops one disturbs what this one does."""
        return await asyncio.wrap_future(self._thread.submit(self._in_transaction, work))

    def submit(self, work: Callable[[sqlite3.Connection], _T], failure: str) -> Future[_T]:
        """The same for a caller that does not wait: when it raises, the log says `failure` and why."""

        def log_failure(ended: Future[_T]) -> None:
            if (error := ended.exception()) is not None:
                logger.error("%s: %s", failure, error)

        future = self._thread.submit(self._in_transaction, work)
        future.add_done_callback(log_failure)
        return future

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
        return all(is_disk_error(part) for part in error.exceptions)
    return isinstance(error, OSError | sqlite3.OperationalError) and not isinstance(error, FileNotFoundError)


def _connect(path: Path | str) -> sqlite3.Connection:
    if isinstance(path, Path):
        path.touch(mode=0o600)  # prompts and answers are in it; SQLite's files beside it have the same mode
    # it is made by one thread and used by another, never by two at one time
    connection = sqlite3.connect(path, timeout=1, check_same_thread=False)
    connection.execute("PRAGMA locking_mode=EXCLUSIVE")  # a second server would answer the same lines
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    try:
        _migrate(connection)
    except BaseException:
        connection.close()  # the file can be deleted or opened again at once
        raise
    return connection


def _migrate(connection: sqlite3.Connection) -> None:
    """The file has this server's version afterwards, or is as it was. Raises NewerSchemaError, sqlite3.Error."""
    connection.execute("BEGIN IMMEDIATE")
    [version] = connection.execute("PRAGMA user_version").fetchone()
    [tables] = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    connection.commit()
    newest = len(_MIGRATIONS)
    if version > newest:
        raise NewerSchemaError(f"a newer server has written it (schema {version}, this one reads up to {newest})")
    steps = "".join(_MIGRATIONS[version:]) if tables else ""  # a new file gets its tables later
    if version < newest:
        connection.executescript(f"BEGIN IMMEDIATE; {steps} PRAGMA user_version = {newest}; COMMIT;")
