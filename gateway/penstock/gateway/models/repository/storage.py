"""A model repository, wherever it lies. Everything here blocks: call it in threads."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.engines.errors import ModelNotFoundError
from penstock.gateway.models.repository.layout import check_model_name, is_model_name
from penstock.gateway.models.repository.storage_cloud import CloudLocation, CloudStorage, parse_url
from penstock.gateway.models.repository.storage_local import LinkRule, LocalStorage

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class LocalModel:
    """A model's folder on a local disk, for as long as it is not closed."""

    folder: Path
    _remove: Callable[[], None] | None = None

    def close(self) -> None:
        """Removes the copy, if it is one. Idempotent."""
        remove, self._remove = self._remove, None
        if remove is not None:
            remove()


class Repository:
    """One `--model-repository`: a path, `s3://`, `gs://` or `as://`. `rule` is for the links of a path; copies from
    object storage have none.

    Raises ConfigError for a url that cannot be, a folder that is not there, and a store whose client is not installed.
    """

    def __init__(self, url: str, rule: LinkRule = "trusted") -> None:
        location = parse_url(url, os.environ)
        self.url = location.url if isinstance(location, CloudLocation) else str(location)
        self._storage = CloudStorage(location) if isinstance(location, CloudLocation) else LocalStorage(location, rule)
        self._skipped: set[str] = set()

    def model_names(self) -> list[str]:
        """The folders that are models, sorted. Hidden ones are not; impossible names are logged once.

        Raises EngineError when the repository cannot be read.
        """
        names = []
        for name in self._storage.names():
            if is_model_name(name):
                names.append(name)
            elif not name.startswith(".") and name not in self._skipped:
                self._skipped.add(name)
                logger.warning("%s: the folder %r is left out, its name cannot be a model's", self.url, name)
        return names

    def fingerprint(self, name: str) -> str:
        """Another text whenever a file of the model comes, goes or changes (by size, time, or the store's tag), or a
        link that is refused.

        Raises ModelNotFoundError, InvalidRequestError for a bad name, EngineError.
        """
        return self._storage.fingerprint(self._checked(name))

    def fetch(self, name: str) -> LocalModel:
        """The model on a local disk: its own folder, or a private copy that `close` removes.

        Raises ModelNotFoundError, InvalidRequestError for a bad name, ModelFileError for a link, EngineError.
        """
        folder = self._storage.fetch(self._checked(name))
        if isinstance(self._storage, LocalStorage):
            return LocalModel(folder)
        return LocalModel(folder, lambda: shutil.rmtree(folder.parent, ignore_errors=True))

    def local_folder(self, name: str) -> Path | None:
        """Of a model that need not be copied for its configuration to be read; None for others."""
        return self._storage.readable_folder(name) if isinstance(self._storage, LocalStorage) else None

    def _checked(self, name: str) -> str:
        if not is_model_name(check_model_name(name)):
            raise ModelNotFoundError(f"failed to find model '{name}' in the model repository")
        return name
