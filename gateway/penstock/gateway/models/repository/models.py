"""The loaded versions of a model, what is known of one, and which ensembles are made of which models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from penstock.classic.base import InferModel, reports_ready
from penstock.classic.caching.cached_model import uncached
from penstock.classic.ensemble.model import EnsembleModel
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.kserve.store import IndexEntry, ModelState
from penstock.gateway.models.repository.storage import LocalModel

logger = logging.getLogger("penstock")

UNLOADED = "unloaded"
"""Triton's reason for models that were loaded once."""


@dataclass(frozen=True, slots=True)
class LoadedVersions:
    """Versions of a model that were loaded together: published, replaced and unloaded as one."""

    models: Mapping[int, InferModel]
    folder: LocalModel | None = None
    """Their files, kept until all of them are unloaded."""
    load_seconds: Mapping[int, float] = field(default_factory=dict)
    """By version: completing the configuration, loading and warming up."""
    by_version: Mapping[str, InferModel] = field(init=False)
    """By the version's text in a request; "" is the newest."""

    def __post_init__(self) -> None:
        by_version = {str(version): model for version, model in self.models.items()}
        by_version[""] = self.models[max(self.models)]
        object.__setattr__(self, "by_version", by_version)

    @property
    def ready(self) -> bool:
        return all(model.ready for model in self.models.values())

    @property
    def reports_ready(self) -> bool:
        return all(map(reports_ready, self.models.values()))

    async def stop(self) -> None:
        """Lets what was accepted end, unloads and gives the files up. Cancelling it ends what still runs."""
        try:
            await stop_models(self.models.values())
        finally:
            if self.folder is not None:
                await close_folder(self.folder)


async def stop_models(models: Iterable[InferModel]) -> None:
    models = list(models)
    ended = await asyncio.gather(*(model.stop() for model in models), return_exceptions=True)
    for model, error in zip(models, ended, strict=True):
        if isinstance(error, Exception):
            logger.error("model %s version %d could not be unloaded", model.name, model.version, exc_info=error)


async def close_folder(folder: LocalModel) -> None:
    try:
        await asyncio.to_thread(folder.close)
    except OSError as error:
        logger.warning("the local copy of a model could not be removed: %s", error.strerror or error)


@dataclass(slots=True, eq=False)
class VersionStatus:
    state: ModelState
    reason: str = ""
    public_reason: str | None = None
    """For callers who may not administer, where it is another."""

    def become(self, state: ModelState, reason: str = "", public_reason: str | None = None) -> None:
        self.state, self.reason, self.public_reason = state, reason, public_reason


@dataclass(slots=True, eq=False)
class ModelEntry:
    """A model that was asked for at least once. What changes it holds `lock`: one change at a time."""

    name: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    versions: dict[int, VersionStatus] = field(default_factory=dict)
    reason: str = ""
    """Why there was nothing to load: a wrong configuration, no version, two models of the name."""
    public_reason: str | None = None
    """For callers who may not administer, where it is another."""
    loaded: LoadedVersions | None = None
    fingerprint: str | None = None
    """Of the files of what is loaded; None when they came with a load request, or the configuration did."""
    tried: str | None = None
    """Of the files of the last attempt, whether it failed or not."""

    def unchanged(self, fingerprint: str) -> bool:
        """Whether loading again would give what is there."""
        return self.loaded is not None and self.loaded.ready and self.fingerprint == fingerprint

    def loading(self, versions: Iterable[int]) -> None:
        """What serves is READY all the while."""
        self.reason, self.public_reason = "", None
        for version in versions:
            if not self._serves(version):
                self.versions[version] = VersionStatus("LOADING")

    def published(self, deployment: LoadedVersions, fingerprint: str | None) -> list[VersionStatus]:
        """Makes `deployment` what is loaded. Returns the states of the versions that it does not have."""
        retired = self.withdrawn(deployment.models)
        self.reason, self.public_reason = "", None
        self.loaded = deployment
        self.fingerprint = self.tried = fingerprint
        for version in deployment.models:
            self.versions[version] = VersionStatus("READY")
        return retired

    def withdrawn(self, kept: Iterable[int] = ()) -> list[VersionStatus]:
        """Nothing is loaded any more. Returns the states, now UNLOADING, of what was, without the versions `kept`."""
        loaded = self.loaded.models if self.loaded is not None else {}
        self.loaded = self.fingerprint = self.tried = None
        retired = [self.versions[version] for version in loaded if version not in set(kept)]
        for status in retired:
            status.become("UNLOADING")
        return retired

    def failed(self, reason: str, versions: Mapping[int, str], public: str | None = None) -> None:
        """`versions`: a reason for each that was to be loaded; empty when it did not come so far. What serves stays
        READY, with the reason beside it."""
        self.reason, self.public_reason = reason, public
        for version, text in versions.items():
            self.versions[version] = VersionStatus("READY" if self._serves(version) else "UNAVAILABLE", text)
        if not versions:
            for version, status in self.versions.items():
                if self.loaded is None or self._serves(version):
                    status.become(status.state, reason, public)

    def confirmed(self) -> None:
        """What serves is what the repository holds: no reason beside it holds any more."""
        self.reason, self.public_reason = "", None
        for version, status in self.versions.items():
            if self._serves(version):
                status.become("READY")

    def index(self, progress: str = "") -> Iterator[IndexEntry]:
        """`progress`: how far what is loaded is."""
        for version, status in sorted(self.versions.items()):
            reason = status.reason or (progress if status.state == "LOADING" else "")
            yield IndexEntry(self.name, str(version), status.state, reason, status.public_reason)
        if not self.versions and self.reason:
            yield IndexEntry(self.name, "", "UNAVAILABLE", self.reason, self.public_reason)

    def _serves(self, version: int) -> bool:
        return self.loaded is not None and version in self.loaded.models


Names = frozenset[str]


class Dependencies:
    def __init__(self, serving: Callable[[str], LoadedVersions | None]) -> None:
        self._serving = serving
        self._loading: dict[str, Names] = {}
        self._lacking: dict[str, Names] = {}
        self._live: set[EnsembleModel] = set()

    def begin(self, ensemble: str, models: Names) -> None:
        """It is being loaded until `end`. Raises InvalidRequestError, in Triton's words, when it would be made of
        itself."""
        self._loading[ensemble] = self._lacking[ensemble] = models
        path = self._path(ensemble, ensemble, set())
        if path:
            chain = " -> ".join((ensemble, *path))
            raise InvalidRequestError(f"circular dependency between ensembles: {chain}")

    def end(self, ensemble: str) -> None:
        """Whether it was loaded or not. What could not be loaded lacks a model, until `published` or `forget`."""
        self._loading.pop(ensemble, None)

    def published(self, name: str, deployment: LoadedVersions) -> None:
        self._lacking.pop(name, None)
        self._live.update(_ensembles(deployment))

    def lost(self, ensemble: str, models: Names) -> None:
        """It served until one of its models was unloaded."""
        self._lacking[ensemble] = models

    def forget(self, ensemble: str) -> None:
        """Nobody waits for it any more."""
        self._lacking.pop(ensemble, None)

    def complete_with(self, name: str) -> list[str]:
        """The ensembles that can be loaded now that this model serves."""
        return [
            ensemble
            for ensemble, models in sorted(self._lacking.items())
            if name in models and ensemble not in self._loading and all(map(self._serving, models))
        ]

    async def settled(self, name: str) -> None:
        """Returns when no request to an ensemble that has begun with this model runs any more."""
        await asyncio.gather(*(deployment.settled() for deployment in self._live if name in deployment.composing))

    def stopped(self, deployment: LoadedVersions) -> None:
        self._live.difference_update(_ensembles(deployment))

    def needed_by_loads(self) -> Names:
        """What ensembles that are being loaded are made of."""
        return Names().union(*self._loading.values())

    def _path(self, start: str, goal: str, seen: set[str]) -> list[str]:
        """From a model to another that it is made of, directly or not; empty if it is not."""
        for name in sorted(self._composing(start)):
            if name == goal:
                return [name]
            if name not in seen:
                seen.add(name)
                if rest := self._path(name, goal, seen):
                    return [name, *rest]
        return []

    def _composing(self, name: str) -> Names:
        return self._loading.get(name) or composing(self._serving(name))


def composing(deployment: LoadedVersions | None) -> Names:
    """The models that any version of it is made of."""
    return Names().union(*(ensemble.composing for ensemble in _ensembles(deployment)))


def _ensembles(deployment: LoadedVersions | None) -> Iterable[EnsembleModel]:
    models = () if deployment is None else map(uncached, deployment.models.values())
    return [model for model in models if isinstance(model, EnsembleModel)]


def wire_again(deployment: LoadedVersions) -> None:
    """One of its models has been replaced. Raises PenstockError when the new one does not fit."""
    for ensemble in _ensembles(deployment):
        ensemble.wire_again()
