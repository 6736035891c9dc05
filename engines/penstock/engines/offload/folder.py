"""Folders of the tier: one for each model and all that its blocks depend on, used by one process at a time."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import secrets
import tempfile
import time
from contextlib import suppress
from pathlib import Path

_KEY = "key"
_LOCK = "lock"
_FILES = ("blocks", "index", _LOCK)
_KEY_BYTES = 32
_NAME = re.compile("[0-9a-f]{32}")
_UNUSED_SECONDS = 7 * 86400.0


def secret_key(folder: Path, purpose: str) -> bytes:
    """32 bytes that stay the same for as long as `folder` exists, others for each purpose of up to 16 characters.

    Raises OSError where the folder can neither be read nor made, ValueError for a key that is damaged or that other
    users can read.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / _KEY
    if not path.exists():
        _make_key(folder, path)
    status, key = path.stat(), path.read_bytes()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ValueError(f"{path} must belong to this user, and nobody else may read it (chmod 600)")
    if len(key) != _KEY_BYTES:
        raise ValueError(f"{path} is damaged: it should have {_KEY_BYTES} bytes, not {len(key)}")
    return hashlib.blake2b(key=key, digest_size=_KEY_BYTES, person=purpose.encode()).digest()


def _make_key(folder: Path, path: Path) -> None:
    """Complete from its first moment on, and never replaced: several processes may do this at once."""
    with tempfile.NamedTemporaryFile("wb", dir=folder, prefix=".") as file:  # 0600
        file.write(secrets.token_bytes(_KEY_BYTES))
        file.flush()
        with suppress(FileExistsError):
            os.link(file.name, path)


class ModelFolder:
    """The part of `root` for models of one identity (`BlockHost.cache_identity`)."""

    def __init__(self, root: Path, identity: str) -> None:
        """Raises OSError and ValueError as `secret_key`."""
        self._root = root
        name = hashlib.blake2b(identity.encode(), key=secret_key(root, "folders"), digest_size=16).hexdigest()
        self.path = root / name
        self.hash_key = self._key("hashes")
        """For hashes of blocks. Those of another identity are others."""
        self.file_key = self._key("files")
        """For checksums of what is written."""
        self._lock: int | None = None

    def _key(self, purpose: str) -> bytes:
        return hashlib.blake2b(self.path.name.encode(), key=secret_key(self._root, purpose), digest_size=32).digest()

    def acquire(self) -> bool:
        """Takes the folder for this process, until `release` or its end. False: another one has it. Raises OSError."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        self._lock = _lock(self.path)
        return self._lock is not None

    def release(self) -> None:
        """The folder counts as used until now, even if nothing was written for long."""
        if self._lock is not None:
            with suppress(OSError):
                os.utime(self._lock)
            os.close(self._lock)
            self._lock = None

    def remove_unused(self) -> None:
        """Deletes folders of other identities that no process has used for a week: a new version of a model, or of
        OpenVINO, has a new folder."""
        for other in self._root.iterdir():
            if other != self.path and _NAME.fullmatch(other.name):
                with suppress(OSError):
                    _remove_if_unused(other)


def _lock(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None: another process does."""
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    if not os.fstat(descriptor).st_nlink:  # the other process has just deleted the folder
        os.close(descriptor)
        return None
    os.utime(descriptor)
    return descriptor


def _remove_if_unused(folder: Path) -> None:
    files = list(folder.iterdir())
    # One without files was left so, or is being taken by another process right now.
    newest = max(path.stat().st_mtime for path in files or (folder,))
    if any(path.name not in _FILES for path in files) or time.time() - newest < _UNUSED_SECONDS:
        return
    descriptor = _lock(folder)
    if descriptor is None:
        return
    try:
        for name in _FILES:
            (folder / name).unlink(missing_ok=True)
        folder.rmdir()
    finally:
        os.close(descriptor)
