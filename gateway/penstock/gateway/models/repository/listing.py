"""The models that the repositories hold, those that serve, and what the index tells of each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.classic.base import InferModel
from penstock.engines.errors import EngineError, InvalidRequestError, ModelNotFoundError, NotReadyError, PenstockError
from penstock.gateway.apis.kserve.store import IndexEntry
from penstock.gateway.models.repository.layout import check_version
from penstock.gateway.models.repository.models import Deployment, ModelEntry, composing
from penstock.gateway.models.repository.storage import Repository
from penstock.gateway.requests.loading_board import LoadingBoard

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
        found = self._names.get(name, ())
        return found[0].local_folder(name) if len(found) == 1 else None

    def find(self, name: str) -> Repository:
        """Looks again. Raises ModelNotFoundError with Triton's text, DuplicateModelError, EngineError."""
        self.refresh()
        found = self._names.get(name)
        if not found:
            raise ModelNotFoundError(f"failed to load '{name}', failed to poll from model repository{_path_hint(name)}")
        if len(found) > 1:
            raise DuplicateModelError(f"failed to load '{name}', failed to poll from model repository: {DUPLICATE}")
        return found[0]


def _path_hint(name: str) -> str:
    """Start scripts give `--load-model` the path of a model's folder."""
    last = name.rstrip("/").rpartition("/")[2]
    return f": a model is loaded by its name, not by a path: '{last}'" if "/" in name and last else ""


class KnownModels:
    """What `ModelRepository` knows of its models. It alone changes `serving`, `entries` and `added`."""

    def __init__(self, listing: RepositoryListing, board: LoadingBoard) -> None:
        self._listing = listing
        self._board = board
        self.serving: dict[str, Deployment] = {}
        self.entries: dict[str, ModelEntry] = {}
        """Of the repositories' models that were asked for at least once."""
        self.added: set[str] = set()
        """Models that belong to no repository."""

    def model(self, name: str, version: str) -> InferModel:
        """Raises ModelNotFoundError or NotReadyError, in Triton's words. `version`: "" for the newest."""
        try:
            return self.serving[name].by_version[version]
        except KeyError:
            raise self._missing(name, version) from None

    def versions(self, name: str) -> list[int]:
        serving = self.serving.get(name)
        return sorted(serving.models) if serving is not None else []

    def models(self) -> list[InferModel]:
        return [model for _, serving in sorted(self.serving.items()) for _, model in sorted(serving.models.items())]

    def load_seconds(self) -> dict[tuple[str, int], float]:
        """How long each version of the repositories that serves took to load, by name and version."""
        return {
            (name, version): seconds
            for name, serving in sorted(self.serving.items())
            for version, seconds in sorted(serving.load_seconds.items())
        }

    def index(self, *, ready: bool) -> list[IndexEntry]:
        """`ready`: only what serves."""
        names = sorted({*self._listing.names, *self.entries, *self.added, *self._board.names()})
        lines = [line for name in names for line in self._lines(name)]
        return [line for line in lines if line.state == "READY"] if ready else lines

    def entry(self, name: str) -> ModelEntry:
        """That of a model which is asked for, from now on."""
        return self.entries.setdefault(name, ModelEntry(name))

    def reason(self, name: str, error: BaseException) -> str:
        """Why a model could not be loaded."""
        entry = self.entries.get(name)
        return entry.reason if entry is not None and entry.reason else str(error)

    def public_reason(self, name: str) -> str | None:
        """For callers who may not administer; None: they may be told what all are."""
        entry = self.entries.get(name)
        return entry.public_reason if entry is not None else None

    def ensembles_of(self, name: str) -> list[str]:
        """Those that serve and have the model as a step."""
        return [each for each, serving in sorted(self.serving.items()) if name in composing(serving)]

    def all_ensembles_of(self, name: str) -> list[str]:
        """Those above them, too."""
        found = [name]
        for each in found:
            found += [ensemble for ensemble in self.ensembles_of(each) if ensemble not in found]
        return found[1:]

    def used(self) -> set[str]:
        """The models that ensembles which serve are made of."""
        return set().union(*map(composing, self.serving.values()))

    def _missing(self, name: str, version: str) -> PenstockError:
        """What is wrong with a request's name or version, in Triton's words."""
        number = check_version(version) if version else 0
        entry = self.entries.get(name)
        known = entry.versions if entry is not None else {}
        if name not in self.serving and not known and name in self._board:
            return NotReadyError(f"Request for unknown model: '{name}' is not at ready state")
        if name not in self.serving and not known:
            return ModelNotFoundError(f"Request for unknown model: '{name}' is not found")
        if not version:
            return ModelNotFoundError(f"Request for unknown model: '{name}' has no available versions")
        if number in known:
            return NotReadyError(f"Request for unknown model: '{name}' version {number} is not at ready state")
        return ModelNotFoundError(f"Request for unknown model: '{name}' version {number} is not found")

    def _lines(self, name: str) -> list[IndexEntry]:
        progress = self._board.text(name)
        if name in self.added:
            return [
                IndexEntry(name, str(model.version), "READY")
                if model.ready
                else IndexEntry(name, str(model.version), "LOADING", progress)
                for model in self.serving[name].models.values()
            ]
        lines = list(self.entries[name].index(progress)) if name in self.entries else []
        if not lines and name in self._board:  # the model of the command line, before there is anything of it
            return [IndexEntry(name, "1", "LOADING", progress)]
        if not lines and self._listing.is_duplicate(name):
            return [IndexEntry(name, "", "UNAVAILABLE", DUPLICATE)]
        return lines or [IndexEntry(name)]
