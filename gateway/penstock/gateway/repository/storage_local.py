"""A repository in a local folder."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from penstock.engines.errors import EngineError, InvalidRequestError, ModelNotFoundError
from penstock.gateway.configuration.config import ConfigError

logger = logging.getLogger(__name__)

_NOT_CONTENT = frozenset({"__pycache__"})
"""What running a model writes into its folder: no reason to load it again."""


class LocalStorage:
    """Models are the folders below `root`. No link in them may lead out of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.real_root = Path(os.path.realpath(root))
        try:
            mode = self.real_root.stat().st_mode
        except OSError as error:
            raise ConfigError(f"the model repository {root} cannot be read: {error.strerror}") from None
        if not stat.S_ISDIR(mode):
            raise ConfigError(f"the model repository {root} is not a folder")
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            logger.warning("the model repository %s can be changed by all users, and models are code", root)

    def names(self) -> list[str]:
        try:
            with os.scandir(self.root) as entries:
                return sorted(entry.name for entry in entries if entry.is_dir())
        except OSError as error:
            raise EngineError(f"the model repository {self.root} cannot be read: {error.strerror}") from None

    def fingerprint(self, name: str) -> str:
        digest = hashlib.sha256()
        for path, info in self._files(name):
            digest.update(f"{path}\0{info.st_size}\0{info.st_mtime_ns}\0{info.st_ino}\n".encode(errors="replace"))
        return digest.hexdigest()

    def fetch(self, name: str) -> Path:
        """The folder itself, when all of its links stay in the repository."""
        for _ in self._files(name):
            pass
        return self.root / name

    def _files(self, name: str) -> Iterator[tuple[str, os.stat_result]]:
        """Every file of the model in a fixed order, through links, each real folder once."""
        folder = self.root / name
        if not folder.is_dir():
            raise ModelNotFoundError(f"failed to find model '{name}' in the model repository")
        pending = [folder]
        seen: set[str] = set()
        while pending:
            current = pending.pop()
            real = self._inside(current, name)
            if real in seen:
                continue
            seen.add(real)
            for entry in self._scan(current, name):
                path = current / entry.name
                if entry.is_symlink():
                    self._inside(path, name)
                if entry.is_dir():
                    pending.append(path)
                    continue
                try:
                    yield str(path.relative_to(folder)), entry.stat()
                except FileNotFoundError:  # gone since it was listed, or a link to nothing
                    continue

    def _scan(self, folder: Path, name: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                return sorted(
                    (entry for entry in entries if entry.name not in _NOT_CONTENT), key=lambda entry: entry.name
                )
        except FileNotFoundError:
            return []
        except OSError as error:
            raise EngineError(f"the folder of model '{name}' cannot be read: {error.strerror}") from None

    def _inside(self, path: Path, name: str) -> str:
        real = os.path.realpath(path)
        if os.path.commonpath([real, self.real_root]) != str(self.real_root):
            relative = path.relative_to(self.root)
            raise InvalidRequestError(f"{relative} of model '{name}' is a link that leads out of the model repository")
        return real
