"""The models that the repositories hold, as last seen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.engines.errors import EngineError, InvalidRequestError, ModelNotFoundError
from penstock.gateway.models.repository.storage import Repository

DUPLICATE = "model appears in two or more repositories"
"""Triton's reason."""


class DuplicateModelError(InvalidRequestError):
    """The name does not tell which of several models is meant."""


class RepositoryListing:
    """The names of the last look at the repositories. `refresh` and `find` block."""

    def __init__(self, repositories: Sequence[Repository]) -> None:
        self._repositories = tuple(repositories)
        self._names: dict[str, list[Repository]] = {}
        self._listed: dict[Repository, Sequence[str]] = {}

    @property
    def names(self) -> set[str]:
        return set(self._names)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def is_duplicate(self, name: str) -> bool:
        return len(self._names.get(name, ())) > 1

    def refresh(self, *, local_only: bool = False) -> None:
        """`local_only`: what is on this machine's disks, which takes microseconds. Raises EngineError."""
        listed = dict(self._listed)
        for repository in self._repositories:
            if not local_only or "://" not in repository.url:
                listed[repository] = repository.model_names()
        names: dict[str, list[Repository]] = {}
        for repository in self._repositories:
            for name in listed.get(repository, ()):
                names.setdefault(name, []).append(repository)
        self._listed, self._names = listed, names

    def refresh_local(self) -> None:
        """What cannot be read stays as it was last seen."""
        try:
            self.refresh(local_only=True)
        except EngineError:
            return

    def local_folder(self, name: str) -> Path | None:
        """Of a model that is on this machine's disks, and the only one of its name."""
        repositories = self._names.get(name, ())
        return repositories[0].local_folder(name) if len(repositories) == 1 else None

    def find(self, name: str) -> Repository:
        """Looks again. Raises ModelNotFoundError with Triton's text, DuplicateModelError, EngineError."""
        self.refresh()
        repositories = self._names.get(name)
        if not repositories:
            raise ModelNotFoundError(f"failed to load '{name}', failed to poll from model repository{_path_hint(name)}")
        if len(repositories) > 1:
            raise DuplicateModelError(f"failed to load '{name}', failed to poll from model repository: {DUPLICATE}")
        return repositories[0]


def _path_hint(name: str) -> str:
    """Start scripts give `--load-model` the path of a model's folder."""
    last = name.rstrip("/").rpartition("/")[2]
    return f": a model is loaded by its name, not by a path: '{last}'" if "/" in name and last else ""
