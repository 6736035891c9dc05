"""Digests of files' whole contents, remembered between starts: a file that has not changed is not read again."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from penstock.engines.host.cores import usable_cores
from penstock.engines.host.user_cache import user_cache

_PART = 64 << 20
"""Bytes that one thread hashes. The digest of a file is that of its parts' digests."""
_PIECE = 1 << 20
"""Bytes that are read at a time: into memory of their own, since pages of a mapped file would count as the process's.
"""
_MOST_THREADS = 8
_STEP = 2_000_000_000
"""Nanoseconds: the longest steps in which a file system counts time (FAT). A file may change again within one, and look
the same."""
_MOST_REMEMBERED = 4096


class FileState(msgspec.Struct, frozen=True, array_like=True):
    """What the file system says of a file without reading it. It is another one after any change of the contents."""

    size: int
    modified: int
    """Nanoseconds. Tools that copy files set it to that of the original."""
    changed: int
    """Nanoseconds: when any of this was changed last, which no tool can set."""
    inode: int
    """Without the device's number, which changes when containers or network file systems mount it again."""


class _Remembered(msgspec.Struct, frozen=True, array_like=True):
    state: FileState
    digest: str


def file_state(path: Path) -> FileState | None:
    """None: it cannot be read. The file is opened, because network file systems ask the server then, and not when they
    are asked for its times alone."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
    except OSError:
        return None
    return FileState(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


def content_digest(path: Path) -> str:
    """Of the file's contents, wherever it lies. Raises OSError. Of a file that changes meanwhile it is of neither
    contents: compare `file_state` before and after."""
    place = user_cache("digests") / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:32]
    begun, state = time.time_ns(), file_state(path)
    remembered = _read(place)
    if remembered is not None and remembered.state == state:
        return remembered.digest
    digest = _hash(path)
    if state is not None and state == file_state(path) and max(state.modified, state.changed) + _STEP < begun:
        with suppress(OSError):  # it is read again at the next start
            _write(place, _Remembered(state, digest))
    return digest


def _hash(path: Path) -> str:
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(min(_MOST_THREADS, usable_cores())) as pool:
        begins = range(0, os.fstat(file.fileno()).st_size, _PART)
        return hashlib.sha256(b"".join(pool.map(partial(_hash_part, file.fileno()), begins))).hexdigest()


def _hash_part(descriptor: int, begin: int) -> bytes:
    digest, buffer, end = hashlib.sha256(), memoryview(bytearray(_PIECE)), begin + _PART
    while begin < end and (count := os.preadv(descriptor, [buffer[: end - begin]], begin)):
        digest.update(buffer[:count])
        begin += count
    return digest.digest()


def _read(place: Path) -> _Remembered | None:
    """None as well for what is damaged."""
    try:
        return msgspec.json.decode(place.read_bytes(), type=_Remembered)
    except (OSError, msgspec.MsgspecError):
        return None


def _write(place: Path, remembered: _Remembered) -> None:
    """Raises OSError."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent.parent) as folder:  # another server may write it, too
        new = Path(folder) / place.name
        new.write_bytes(msgspec.json.encode(remembered))
        new.replace(place)
    by_age = sorted(place.parent.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in by_age[_MOST_REMEMBERED:]:
        path.unlink()


_VOCABULARY = {"config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json"}
_WEIGHTS = {".safetensors", ".gguf", ".bin", ".xml"}


class ModelDigests(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a model's files are (`model_digests`). Copies of a folder have the same. An empty one is not
    known, and differs from none."""

    vocabulary: str = ""
    """Of its configuration and its tokenizer: what token ids mean."""
    weights: str = ""
    """Gateways whose engine runs elsewhere need none."""

    def differs(self, other: ModelDigests) -> str:
        """What is not the same, in words; empty: nothing that is known of both."""
        if self.vocabulary and other.vocabulary and self.vocabulary != other.vocabulary:
            return "configuration or tokenizer"
        return "weights" if self.weights and other.weights and self.weights != other.weights else ""


ANY_MODEL = ModelDigests()


def model_digests(folder: Path) -> ModelDigests:
    """Raises OSError."""
    paths = sorted((path for path in folder.iterdir() if path.is_file()), key=lambda path: path.name)
    vocabulary = [path for path in paths if path.name in _VOCABULARY or path.suffix == ".tiktoken"]
    weights = [path for path in paths if path.suffix in _WEIGHTS]
    return ModelDigests(_digest_of(vocabulary), _digest_of(weights) if weights else "")


def _digest_of(paths: Iterable[Path]) -> str:
    known = [(path.name, content_digest(path)) for path in paths]
    return hashlib.blake2b(repr(known).encode(), digest_size=16).hexdigest()
