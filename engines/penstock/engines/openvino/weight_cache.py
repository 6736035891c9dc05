"""Quantized weights, and floats made of them, in a file, made at the first start with a checkpoint and mapped at all
starts.

The file is a cache, and it is also where the weights live: the plugin packs what it multiplies, and what is mapped from
a file can then leave the memory, while what a process has made itself has to stay.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

Array = npt.NDArray[Any]

_FORMAT = "2"
"""Of the file, and of how weights are quantized: a change makes new files."""
_SUFFIX = ".weights"
_BEGUN = ".new-"
"""How names of files begin that are not complete. Other hidden files may be a network file system's own, which stand
for deleted ones that are still mapped."""
_MAGIC = b"PNSTKW02"
_DIGEST_BYTES = 32


class _Entry(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    offset: int


class WeightCache:
    """Arrays by the name of a tensor, in one file of `folder`. Files beyond `limit` bytes together are deleted, the one
    that was used least recently first; 0: nothing is kept.

    What cannot be written is kept in memory, and a line in the log says so.
    """

    def __init__(self, folder: Path, limit: int, key: str) -> None:
        """`key`: see `cache_key`."""
        self._folder = folder
        self._limit = limit
        self._path = folder / f"{key}{_SUFFIX}"
        self._entries: dict[str, list[_Entry]] = {}
        self._maps: list[mmap.mmap] = []
        self._mapping: mmap.mmap | None = None
        self._file: IO[bytes] | None = None
        if limit:
            self._open()

    def arrays(self, name: str, make: Callable[[], Sequence[Array]]) -> Sequence[Array]:
        """Those of the file, else what `make` gives, which is put into it."""
        entries = self._entries.get(name)
        if self._mapping is not None and entries is not None:
            return [_view(self._mapping, entry) for entry in entries]
        arrays = make()
        if self._file is None:
            return arrays
        try:
            return self._write(self._file, name, arrays)
        except OSError as error:
            self._give_up(error)
            return arrays

    def finish(self, *, keep: bool = True) -> None:
        """The file is complete: the next start finds it, unless it is not to be kept."""
        if self._file is None:
            return
        if not keep:
            self._discard()
            return
        try:
            index = msgspec.json.encode(self._entries)
            self._file.write(index + _digest(index, self._file.tell()) + len(index).to_bytes(8, "little") + _MAGIC)
            self._file.flush()
            os.fsync(self._file.fileno())  # a machine that stops must not leave a whole file's name and half of it
            Path(self._file.name).replace(self._path)  # before it is closed, which ends its lock
            self._file.close()
            self._make_room()
        except OSError as error:
            self._give_up(error)
        self._file = None

    def release_pages(self) -> None:
        """Gives the memory behind the mappings back to the system."""
        for mapping in (*self._maps, *([self._mapping] if self._mapping else [])):
            mapping.madvise(mmap.MADV_DONTNEED)

    def _discard(self) -> None:
        """Leaves nothing behind: after a failure half of it is missing."""
        if self._file is not None:
            _remove(self._file)
            self._file = None

    def _open(self) -> None:
        try:
            with self._path.open("rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._entries = _read_index(mapping)
            self._mapping = mapping
        except FileNotFoundError:
            self._begin()
        except (OSError, ValueError, TypeError, msgspec.MsgspecError) as error:
            logger.warning("the damaged file of cached weights is rebuilt: %s: %s", self._path.name, error)
            self._begin()
        else:
            with suppress(OSError):  # of another user, or on a file system that is only read
                os.utime(self._path)

    def _begin(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(self._folder)
            self._file = _begun(self._folder)
            weakref.finalize(self, _remove, self._file)  # loading may fail before `finish`
        except OSError as error:
            self._give_up(error)

    def _write(self, file: IO[bytes], name: str, arrays: Sequence[Array]) -> Sequence[Array]:
        begin = -(-file.tell() // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        file.seek(begin)
        entries = []
        for array in arrays:
            file.seek(-(-file.tell() // 64) * 64)
            entries.append(_Entry(array.dtype.str, array.shape, file.tell()))
            file.write(array.data if array.flags.c_contiguous else np.ascontiguousarray(array).data)
        file.flush()
        with open(file.name, "rb") as readable:
            mapping = mmap.mmap(readable.fileno(), file.tell() - begin, access=mmap.ACCESS_READ, offset=begin)
        self._maps.append(mapping)
        self._entries[name] = entries
        return [_view(mapping, entry, begin) for entry in entries]

    def _give_up(self, error: OSError) -> None:
        logger.warning("converted weights stay in memory: %s: %s", self._folder, error.strerror or error)
        self._discard()

    def _make_room(self) -> None:
        files = []
        for path in self._folder.glob("*" + _SUFFIX):
            with suppress(OSError):  # another process makes room, too
                files.append((path.stat().st_mtime, path.stat().st_size, path))
        total = 0
        for _, size, path in sorted(files, reverse=True):
            total += size
            if total > self._limit and path != self._path:
                with suppress(OSError):
                    path.unlink()


def cache_key(kind: str, content: str) -> str:
    """For weights of this kind, made of a checkpoint with this content (`Checkpoint.content_key`)."""
    return hashlib.sha256(repr((_FORMAT, kind, content)).encode()).hexdigest()[:32]


def _remove(file: IO[bytes]) -> None:
    """Unless it is complete, or has been removed."""
    if file.closed:
        return
    with suppress(OSError):  # where the disk is full, what waits in the buffer fails again
        file.close()
    with suppress(OSError):
        os.unlink(file.name)


def _begun(folder: Path) -> IO[bytes]:
    """A new file, with a lock. Before it has that, another process may take it for an abandoned one."""
    while True:
        file = tempfile.NamedTemporaryFile("wb", dir=folder, prefix=_BEGUN, delete=False)  # noqa: SIM115
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()


def _remove_abandoned(folder: Path) -> None:
    """Files that were begun by processes that ended before they were complete: nobody holds their lock."""
    for path in folder.glob(_BEGUN + "*"):
        with suppress(OSError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def _read_index(mapping: mmap.mmap) -> dict[str, list[_Entry]]:
    """Raises ValueError and MsgspecError for a file that is damaged."""
    end = len(mapping) - len(_MAGIC) - 8
    if mapping[-len(_MAGIC) :] != _MAGIC:
        raise ValueError("it does not end as it should")
    length = int.from_bytes(mapping[end : end + 8], "little")
    end -= _DIGEST_BYTES
    begin = end - length
    index = mapping[max(0, begin) : max(0, end)]
    if _digest(index, begin) != mapping[max(0, end) : end + _DIGEST_BYTES]:
        raise ValueError("its index is not what was written")
    return msgspec.json.decode(index, type=dict[str, list[_Entry]])


def _digest(index: bytes, begin: int) -> bytes:
    """Of the index, and of where in the file it begins."""
    return hashlib.sha256(b"%d " % begin + index).digest()


def _view(mapping: mmap.mmap, entry: _Entry, begin: int = 0) -> Array:
    count = math.prod(entry.shape)
    return np.frombuffer(mapping, entry.dtype, count, entry.offset - begin).reshape(entry.shape)
