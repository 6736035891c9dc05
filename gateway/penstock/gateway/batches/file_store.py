"""Uploaded files, and those that batches write: bytes in a folder, the rest in the database."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import time
import uuid
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from penstock.engines.errors import InvalidRequestError, NotFoundError, OverloadedError
from penstock.gateway.database import Database

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL, bytes INTEGER NOT NULL,
    created REAL NOT NULL, expires REAL
);
"""
_COLUMNS = "id, filename, purpose, bytes, created, expires"


@dataclass(frozen=True, slots=True)
class FileBounds:
    bytes: int
    """Of all files together, those that batches have written included."""
    bytes_of_tenant: int
    files_of_tenant: int
    retention: float | None
    """Seconds after which every file is deleted; None: never."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    id: str
    filename: str
    purpose: str
    bytes: int
    created: float
    expires: float | None
    """Seconds since 1970; None: it stays until it is deleted."""

    def shown(self) -> dict[str, object]:
        """https://platform.openai.com/docs/api-reference/files/object"""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": int(self.created),
            "expires_at": None if self.expires is None else int(self.expires),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileStore:
    """A file belongs to its tenant; for others it does not exist."""

    def __init__(
        self, folder: Path, database: Database, bounds: FileBounds, in_use: Callable[[], Awaitable[Collection[str]]]
    ) -> None:
        """`in_use` gives the ids of files that must not go yet, although their time is over. Raises OSError,
        sqlite3.Error."""
        database.create(_SCHEMA)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._found_at_start = [path.name for path in folder.iterdir()]
        self._folder = folder
        self._database = database
        self._bounds = bounds
        self._in_use = in_use

    async def add(
        self,
        tenant: str,
        filename: str,
        purpose: str,
        content: IO[bytes],
        *,
        lifetime: float | None = None,
        own_id: str | None = None,
    ) -> StoredFile:
        """Copies the content. `lifetime`: seconds. `own_id` is for the server's results: there is always room for them,
        and what had this id is replaced. Raises OverloadedError when there is no room."""
        await self.delete_expired()
        content.seek(0, os.SEEK_END)
        size = content.tell()
        content.seek(0)
        now = time.time()
        lifetime = min((each for each in (lifetime, self._bounds.retention) if each is not None), default=None)
        expires = None if lifetime is None else now + lifetime
        stored = StoredFile(own_id or f"file-{uuid.uuid4().hex}", filename, purpose, size, now, expires)

        def insert(connection: sqlite3.Connection) -> None:
            if own_id is None:
                self._check_room(connection, tenant, 1, size)
            row = (stored.id, tenant, filename, purpose, size, now, expires)
            connection.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", row)

        await asyncio.to_thread(self._write, stored.id, content)
        try:
            await self._database.run(insert)
        except BaseException:
            self.path(stored.id).unlink(missing_ok=True)
            raise
        return stored

    async def check_room(self, tenant: str, files: int, size: int) -> None:
        """Whether the tenant could add so many files, of so many bytes. Raises OverloadedError."""
        await self.delete_expired()
        await self._database.run(lambda connection: self._check_room(connection, tenant, files, size))

    def _check_room(self, connection: sqlite3.Connection, tenant: str, files: int, size: int) -> None:
        query = "SELECT coalesce(sum(bytes), 0), coalesce(sum((tenant = ?) * bytes), 0), coalesce(sum(tenant = ?), 0)"
        held, of_tenant, count = connection.execute(f"{query} FROM files", (tenant, tenant)).fetchone()
        if count + files > self._bounds.files_of_tenant:
            raise OverloadedError(f"You have {count} files: delete some first.")
        if held + size > self._bounds.bytes or of_tenant + size > self._bounds.bytes_of_tenant:
            raise OverloadedError("There is no room for this file: delete others first (--data-size).")

    async def delete_strays(self) -> None:
        """What a killed server has left in the folder without an entry in the database."""
        found, self._found_at_start = self._found_at_start, []

        def select(connection: sqlite3.Connection) -> set[str]:
            return {file_id for (file_id,) in connection.execute("SELECT id FROM files")}

        for name in set(found) - await self._database.run(select):
            with suppress(OSError):
                await asyncio.to_thread(self.path(name).unlink)

    def _write(self, file_id: str, content: IO[bytes]) -> None:
        """A file has its name only when all of it is there. What a full disk has taken of it is deleted: it would keep
        the disk full."""
        part = self._folder / f"{file_id}.part"
        try:
            with part.open("wb") as out:
                shutil.copyfileobj(content, out, 1 << 20)
            part.rename(self.path(file_id))
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def path(self, file_id: str) -> Path:
        """Of a file that was found."""
        return self._folder / file_id

    async def find(self, tenant: str, file_id: str, param: str = "file_id") -> StoredFile:
        """Raises NotFoundError; `param` is the caller's field."""

        def select(connection: sqlite3.Connection) -> tuple[object, ...] | None:
            found = connection.execute(
                f"SELECT {_COLUMNS} FROM files WHERE id = ? AND tenant = ? AND coalesce(expires, ?) > ?",
                (file_id, tenant, time.time() + 1, time.time()),
            )
            row: tuple[object, ...] | None = found.fetchone()
            return row

        row = await self._database.run(select)
        if row is None:
            raise NotFoundError("There is no file with this id.", param=param)
        return StoredFile(*row)  # type: ignore[arg-type]

    async def of_tenant(self, tenant: str, purpose: str | None) -> list[StoredFile]:
        """The oldest first."""
        await self.delete_expired()

        def select(connection: sqlite3.Connection) -> list[tuple[object, ...]]:
            return connection.execute(
                f"SELECT {_COLUMNS} FROM files WHERE tenant = ? AND purpose = coalesce(?, purpose) "
                "ORDER BY created, id",
                (tenant, purpose),
            ).fetchall()

        return [StoredFile(*row) for row in await self._database.run(select)]  # type: ignore[arg-type]

    async def delete(self, tenant: str, file_id: str) -> None:
        """Raises NotFoundError, InvalidRequestError."""
        await self.find(tenant, file_id)
        if file_id in await self._in_use():
            raise InvalidRequestError("A batch that has not ended reads this file.", param="file_id")
        await self._forget([file_id])

    async def delete_expired(self) -> None:
        used = await self._in_use()

        def select(connection: sqlite3.Connection) -> list[str]:
            found = connection.execute("SELECT id FROM files WHERE expires <= ?", (time.time(),))
            return [file_id for (file_id,) in found if file_id not in used]

        await self._forget(await self._database.run(select))

    async def _forget(self, ids: list[str]) -> None:
        if not ids:
            return

        def delete(connection: sqlite3.Connection) -> None:
            connection.executemany("DELETE FROM files WHERE id = ?", [(each,) for each in ids])

        await self._database.run(delete)
        for each in ids:
            with suppress(OSError):
                await asyncio.to_thread(self.path(each).unlink, missing_ok=True)
