"""Uploaded files, and those that batches write: bytes in a folder, the rest in the database."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import time
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from penstock.engines.errors import InvalidRequestError, NotFoundError, OverloadedError
from penstock.gateway.batches.database import Database

_COLUMNS = "id, filename, purpose, bytes, created, expires"


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

    def __init__(self, folder: Path, database: Database, most_bytes: int) -> None:
        """`most_bytes` of all files together. Raises OSError."""
        self.in_use: Callable[[], Collection[str]] = tuple
        """Ids of files that must not go yet, although their time is over."""
        folder.mkdir(parents=True, exist_ok=True)
        for torn in folder.glob("*.part"):
            torn.unlink()
        self._folder = folder
        self._database = database
        self._most_bytes = most_bytes

    async def add(
        self,
        tenant: str,
        filename: str,
        purpose: str,
        content: IO[bytes],
        *,
        lifetime: float | None = None,
        own: bool = False,
    ) -> StoredFile:
        """Copies the content. `lifetime`: seconds. Raises OverloadedError when there is no room; for the server's `own`
        results there is."""
        await self.delete_expired()
        content.seek(0, os.SEEK_END)
        size = content.tell()
        content.seek(0)
        now = time.time()
        expires = None if lifetime is None else now + lifetime
        stored = StoredFile(f"file-{uuid.uuid4().hex}", filename, purpose, size, now, expires)

        def insert(connection: sqlite3.Connection) -> None:
            [held] = connection.execute("SELECT coalesce(sum(bytes), 0) FROM files").fetchone()
            if held + size > self._most_bytes and not own:
                raise OverloadedError("There is no room for this file: delete others first (--data-size).")
            row = (stored.id, tenant, filename, purpose, size, now, expires)
            connection.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", row)

        await asyncio.to_thread(self._write, stored.id, content)
        try:
            await self._database.run(insert)
        except BaseException:
            self.path(stored.id).unlink(missing_ok=True)
            raise
        return stored

    def _write(self, file_id: str, content: IO[bytes]) -> None:
        """A file has its name only when all of it is there."""
        part = self._folder / f"{file_id}.part"
        with part.open("wb") as out:
            shutil.copyfileobj(content, out, 1 << 20)
        part.rename(self.path(file_id))

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
        if file_id in self.in_use():
            raise InvalidRequestError("A batch that has not ended reads this file.", param="file_id")
        await self._forget([file_id])

    async def delete_expired(self) -> None:
        used = frozenset(self.in_use())

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
