"""A repository in object storage, through fsspec. Models are copied to a private temporary folder to be loaded."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import fsspec

from penstock.engines.errors import EngineError, InvalidRequestError, ModelNotFoundError
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.repository.storage_urls import CloudLocation

_VERSION_KEYS = ("ETag", "etag", "md5Hash", "generation", "content_md5", "LastModified", "last_modified", "mtime")
"""What the stores call the things that change with a file's content."""
_SECRET_OPTIONS = ("key", "secret", "token", "account_key")
_MAX_DETAIL_CHARS = 200

_T = TypeVar("_T")


class CloudStorage:
    """Models are what lies below `root/<name>/`."""

    def __init__(self, location: CloudLocation, filesystem: Any = None) -> None:
        self.location = location
        self._fs = filesystem if filesystem is not None else _filesystem(location)

    def names(self) -> list[str]:
        root = self.location.root
        found: list[dict[str, Any]] = self._try(lambda: self._fs.ls(root, detail=True), missing=EngineError)
        return sorted({PurePosixPath(entry["name"]).name for entry in found if entry["type"] == "directory"})

    def fingerprint(self, name: str) -> str:
        digest = hashlib.sha256()
        for path, info in self._files(name).items():
            versions = [str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None]
            digest.update("\0".join([path, str(info.get("size")), *versions, "\n"]).encode(errors="replace"))
        return digest.hexdigest()

    def fetch(self, name: str) -> Path:
        """A copy in a folder that nobody else can read; its parent is to be removed by the caller."""
        files = self._files(name)
        size = sum(info.get("size") or 0 for info in files.values())
        try:
            parent = Path(tempfile.mkdtemp(prefix="penstock-model-", dir=self.location.mount))
        except OSError as error:
            raise EngineError(f"no folder for a copy of model '{name}' can be made: {error.strerror}") from None
        try:
            if size > shutil.disk_usage(parent).free:
                raise EngineError(f"model '{name}' has {size} bytes, more than there is free disk space for its copy")
            folder = parent / name
            folder.mkdir()
            for path in files:
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
            keys, targets = [info["name"] for info in files.values()], [str(folder / path) for path in files]
            self._try(partial(self._fs.get, keys, targets))  # lists are taken as they are: no wildcards in keys
        except BaseException:
            shutil.rmtree(parent, ignore_errors=True)
            raise
        return folder

    def _files(self, name: str) -> dict[str, dict[str, Any]]:
        """Every file of the model by its path below the model's folder, in a fixed order."""
        prefix = f"{self.location.root}/{name}"
        found: dict[str, dict[str, Any]] = self._try(lambda: self._fs.find(prefix, detail=True))
        files: dict[str, dict[str, Any]] = {}
        for key, info in sorted(found.items()):
            path = key.strip("/").removeprefix(prefix).lstrip("/")
            if path and info["type"] == "file" and not key.endswith("/"):
                files[_safe(path, name)] = info
        if not files:
            raise ModelNotFoundError(f"failed to find model '{name}' in the model repository")
        return files

    def _try(self, call: Callable[[], _T], missing: type[Exception] = ModelNotFoundError) -> _T:
        """Errors of the store in our words, with the url and without credentials."""
        try:
            self._fs.invalidate_cache()
            return call()
        except FileNotFoundError:
            raise missing(f"there is nothing at {self.location.url}, or it was removed while it was read") from None
        except Exception as error:  # each store has its own classes
            detail = f"{type(error).__name__}: {error}".partition("\n")[0]
            for option in _SECRET_OPTIONS:
                if self.location.options.get(option):
                    detail = detail.replace(str(self.location.options[option]), "***")
            raise EngineError(f"{self.location.url} cannot be read: {detail[:_MAX_DETAIL_CHARS]}") from None


def _safe(path: str, name: str) -> str:
    """Keys of object storage may hold anything; only those that stay below the copy's folder become files."""
    parts = path.split("/")
    if any(part in ("", ".", "..") or "\0" in part for part in parts) or any(
        len(part.encode()) > 255 for part in parts
    ):
        raise InvalidRequestError(f"model '{name}' has a file in its repository whose path cannot be on a disk")
    return path


def _filesystem(location: CloudLocation) -> Any:
    try:
        return fsspec.filesystem(
            location.protocol, skip_instance_cache=True, use_listings_cache=False, **location.options
        )
    except ImportError:
        raise ConfigError(
            f"{location.url} needs a package that is not installed: pip install 'penstock-server[{location.extra}]'"
        ) from None
    except Exception as error:
        raise ConfigError(f"{location.url} cannot be used: {type(error).__name__}") from None
