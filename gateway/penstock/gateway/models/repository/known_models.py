"""The models of a repository that serve or were asked for, and what the index tells of each."""

from __future__ import annotations

from penstock.classic.base import InferModel
from penstock.engines.errors import ModelNotFoundError, NotReadyError, PenstockError
from penstock.gateway.apis.kserve.store import IndexEntry
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.models.repository.layout import check_version
from penstock.gateway.models.repository.listing import DUPLICATE, RepositoryListing
from penstock.gateway.models.repository.models import ModelEntry, composing
from penstock.gateway.requests.loading_board import LoadingBoard


class KnownModels:
    """What `ModelRepository` knows of its models. It alone changes `entries` and `added`, and the tensors of the
    catalogue's entries: what serves."""

    def __init__(self, listing: RepositoryListing, catalogue: Catalogue, board: LoadingBoard) -> None:
        self._listing = listing
        self._catalogue = catalogue
        self._board = board
        self.entries: dict[str, ModelEntry] = {}
        """Of the repositories' models that were asked for at least once."""
        self.added: set[str] = set()
        """Models that belong to no repository."""

    def versions(self, name: str) -> list[int]:
        serving = self._catalogue.deployment(name)
        return sorted(serving.models) if serving is not None else []

    def models(self) -> list[InferModel]:
        return [model for _, serving in self._catalogue.deployments() for _, model in sorted(serving.models.items())]

    def load_seconds(self) -> dict[tuple[str, int], float]:
        """How long each version of the repositories that serves took to load, by name and version."""
        return {
            (name, version): seconds
            for name, serving in self._catalogue.deployments()
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
        return [ensemble for ensemble, serving in self._catalogue.deployments() if name in composing(serving)]

    def all_ensembles_of(self, name: str) -> list[str]:
        """Those above them, too."""
        names = [name]
        for part in names:
            names += [ensemble for ensemble in self.ensembles_of(part) if ensemble not in names]
        return names[1:]

    def used(self) -> set[str]:
        """The models that ensembles which serve are made of."""
        return set().union(*(composing(serving) for _, serving in self._catalogue.deployments()))

    def missing(self, name: str, version: str) -> PenstockError:
        """What is wrong with the name or version of a request that no model serves, in Triton's words."""
        number = check_version(version) if version else 0
        entry = self.entries.get(name)
        known = entry.versions if entry is not None else {}
        serves = self._catalogue.deployment(name) is not None
        if not serves and not known and name in self._board:
            return NotReadyError(f"Request for unknown model: '{name}' is not at ready state")
        if not serves and not known:
            return ModelNotFoundError(f"Request for unknown model: '{name}' is not found")
        if not version:
            return ModelNotFoundError(f"Request for unknown model: '{name}' has no available versions")
        if number in known:
            return NotReadyError(f"Request for unknown model: '{name}' version {number} is not at ready state")
        return ModelNotFoundError(f"Request for unknown model: '{name}' version {number} is not found")

    def _lines(self, name: str) -> list[IndexEntry]:
        progress = self._board.text(name)
        serving = self._catalogue.deployment(name)
        if name in self.added and serving is not None:
            return [
                IndexEntry(name, str(model.version), "READY")
                if model.ready
                else IndexEntry(name, str(model.version), "LOADING", progress)
                for model in serving.models.values()
            ]
        lines = list(self.entries[name].index(progress)) if name in self.entries else []
        if not lines and name in self._board:  # the model of the command line, before there is anything of it
            return [IndexEntry(name, "1", "LOADING", progress)]
        if not lines and self._listing.is_duplicate(name):
            return [IndexEntry(name, "", "UNAVAILABLE", DUPLICATE)]
        return lines or [IndexEntry(name)]
