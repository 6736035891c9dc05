"""Uploaded files, and those that batches write: bytes in a folder or in memory, the rest in the database."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import sqlite3
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from penstock.engines.errors import InvalidRequestError, NotFoundError, OverloadedError
from penstock.gateway.database import Database

if TYPE_CHECKING:
    from typing_extensions import Buffer
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


_COLUMNS = "id, filename, purpose, bytes, created, expires"


MAX_FILE_BYTES = 200 << 20
"""As OpenAI's for batches."""
FOR_MODELS = ("user_data", "vision")
"""Purposes of files that requests show to models."""
MESSAGE_BATCH = "message_batch"
"""The purpose of files of Anthropic's batches, which only these show."""


class Contents(Protocol):
    """Where the bytes of files are. Its methods are for threads."""

    def names(self) -> Collection[str]:
        """Of all that is there."""
        ...

    def draft(self) -> IO[bytes]:
        """For what becomes a file later; it is gone when it is closed."""
        ...

    def write(self, file_id: str, content: IO[bytes]) -> None:
        """Copies the content, in place of what has had this id. Raises OSError."""
        ...

    def open(self, file_id: str) -> IO[bytes]:
        """Raises NotFoundError, OSError."""
        ...

    def delete(self, file_id: str) -> None:
        """Idempotent. Raises OSError."""
        ...


class FolderContents:
    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder

    def names(self) -> Collection[str]:
        return [path.name for path in self._folder.iterdir()]

    def draft(self) -> IO[bytes]:
        return tempfile.TemporaryFile()

    def write(self, file_id: str, content: IO[bytes]) -> None:
        """A file has its name only when all of it is there. What a full disk has taken of it is deleted: it would keep
        the disk full."""
        part = self._folder / f"{file_id}.part"
        try:
            with part.open("wb") as out:
                shutil.copyfileobj(content, out, 1 << 20)
            part.rename(self._folder / file_id)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def open(self, file_id: str) -> IO[bytes]:
        try:
            return (self._folder / file_id).open("rb")
        except FileNotFoundError:
            raise _deleted() from None

    def delete(self, file_id: str) -> None:
        (self._folder / file_id).unlink(missing_ok=True)


class MemoryContents:
    """A file that is deleted frees its memory at once: whatever still reads it gets NotFoundError."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def names(self) -> Collection[str]:
        return list(self._files)

    def draft(self) -> IO[bytes]:
        return io.BytesIO()

    def write(self, file_id: str, content: IO[bytes]) -> None:
        self._files[file_id] = content.read()

    def open(self, file_id: str) -> IO[bytes]:
        reader = _MemoryReader(self._files, file_id)
        reader.content()
        return io.BufferedReader(reader, 1 << 16)

    def delete(self, file_id: str) -> None:
        self._files.pop(file_id, None)


class _MemoryReader(io.RawIOBase):
    """Holds none of the bytes that it reads."""

    def __init__(self, files: Mapping[str, bytes], file_id: str) -> None:
        self._files = files
        self._file_id = file_id
        self._at = 0

    def content(self) -> bytes:
        """Raises NotFoundError."""
        content = self._files.get(self._file_id)
        if content is None:
            raise _deleted()
        return content

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        target = memoryview(buffer)
        piece = self.content()[self._at : self._at + len(target)]
        target[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


def _deleted() -> NotFoundError:
    return NotFoundError("This file was deleted.", param="file_id")


@dataclass(frozen=True, slots=True)
class StoredFile:
    id: str
    filename: str
    purpose: str
    bytes: int
    created: float
    expires: float | None
    """Seconds since 1970; None: it stays until it is deleted."""
    volatile: bool = False
    """It is gone when the server ends."""

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
            **({"volatile": True} if self.volatile else {}),
        }


class FileStore:
    """A file belongs to its tenant; for others it does not exist."""

    def __init__(
        self, contents: Contents, database: Database, room: Room, in_use: Callable[[], Awaitable[Collection[str]]]
    ) -> None:
        """`in_use` gives the ids of files that must not go yet, although their time is over. Raises OSError."""
        self._found_at_start = contents.names()
        self.contents = contents
        self._database = database
        self._room = room
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
        content.seek(0, os.SEEK_END)
        size = content.tell()
        content.seek(0)
        if own_id is None:
            await self.check_room(tenant, 1, size)
        now = time.time()
        lifetime = min(
            (seconds for seconds in (lifetime, self._room.bounds.retention) if seconds is not None), default=None
        )
        expires = None if lifetime is None else now + lifetime
        file_id = own_id or f"file-{uuid.uuid4().hex}"
        stored = StoredFile(file_id, filename, purpose, size, now, expires, self._room.volatile)

        def insert(connection: sqlite3.Connection) -> None:
            if own_id is None:
                self._room.check(connection, tenant, 1, size)
            row = (stored.id, tenant, filename, purpose, size, now, expires)
            connection.execute("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", row)

        await asyncio.to_thread(self.contents.write, stored.id, content)
        try:
            await self._database.run(insert)
        except BaseException:
            self.contents.delete(stored.id)
            raise
        return stored

    async def check_room(self, tenant: str, files: int, size: int) -> None:
        """Whether the tenant could add so many files, of so many bytes. Raises OverloadedError."""
        await self.delete_expired()
        await self._database.run(lambda connection: self._room.check(connection, tenant, files, size))

    async def delete_strays(self) -> None:
        """What a killed server has left in the folder without an entry in the database."""
        at_start, self._found_at_start = self._found_at_start, ()

        def select(connection: sqlite3.Connection) -> set[str]:
            return {file_id for (file_id,) in connection.execute("SELECT id FROM files")}

        for name in set(at_start) - await self._database.run(select):
            with suppress(OSError):
                await asyncio.to_thread(self.contents.delete, name)

    async def find(self, tenant: str, file_id: str, param: str = "file_id") -> StoredFile:
        """Raises NotFoundError; `param` is the caller's field."""

        def select(connection: sqlite3.Connection) -> tuple[object, ...] | None:
            rows = connection.execute(
                f"SELECT {_COLUMNS} FROM files WHERE id = ? AND tenant = ? AND coalesce(expires, ?) > ?",
                (file_id, tenant, time.time() + 1, time.time()),
            )
            row: tuple[object, ...] | None = rows.fetchone()
            return row

        row = await self._database.run(select)
        if row is None:
            raise NotFoundError("There is no file with this id.", param=param)
        return self._stored(row)

    async def image(self, tenant: str, file_id: str, most: int, where: str) -> bytes:
        """The content of a file for models, of at most `most` bytes. Raises InvalidRequestError, NotFoundError."""
        stored = await self.find(tenant, file_id, where)
        if stored.purpose not in FOR_MODELS:
            message = f"{where}: the file's purpose must be {' or '.join(FOR_MODELS)}."
            raise InvalidRequestError(message, param=where)
        if stored.bytes > most:
            raise InvalidRequestError(f"{where}: the file has more than {most} bytes.", param=where)
        return await asyncio.to_thread(self._read, stored.id, most)

    def _read(self, file_id: str, most: int) -> bytes:
        with self.contents.open(file_id) as file:
            return file.read(most)

    async def of_tenant(self, tenant: str, purpose: str | None) -> list[StoredFile]:
        """The oldest first, without those of Anthropic's batches."""
        await self.delete_expired()

        def select(connection: sqlite3.Connection) -> list[tuple[object, ...]]:
            return connection.execute(
                f"SELECT {_COLUMNS} FROM files WHERE tenant = ? AND purpose = coalesce(?, purpose) AND purpose != ? "
                "ORDER BY created, id",
                (tenant, purpose, MESSAGE_BATCH),
            ).fetchall()

        return [self._stored(row) for row in await self._database.run(select)]

    def _stored(self, row: tuple[object, ...]) -> StoredFile:
        return StoredFile(*row, volatile=self._room.volatile)  # type: ignore[arg-type,misc]

    async def delete(self, tenant: str, file_id: str) -> None:
        """Raises NotFoundError, InvalidRequestError."""
        await self.find(tenant, file_id)
        if file_id in await self._in_use():
            raise InvalidRequestError("A batch that has not ended reads this file.", param="file_id")
        await self.forget([file_id])

    async def delete_expired(self) -> None:
        used = await self._in_use()

        def select(connection: sqlite3.Connection) -> list[str]:
            rows = connection.execute("SELECT id FROM files WHERE expires <= ?", (time.time(),))
            return [file_id for (file_id,) in rows if file_id not in used]

        await self.forget(await self._database.run(select))

    async def forget(self, ids: Sequence[str]) -> None:
        """Deletes these, as far as they are there."""
        if not ids:
            return

        def delete(connection: sqlite3.Connection) -> None:
            connection.executemany("DELETE FROM files WHERE id = ?", [(file_id,) for file_id in ids])

        await self._database.run(delete)
        for file_id in ids:
            with suppress(OSError):
                await asyncio.to_thread(self.contents.delete, file_id)
