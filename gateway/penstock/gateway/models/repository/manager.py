"""The models of a server: those of its repositories, loaded, replaced and unloaded while it serves, and added ones.

A model's versions are loaded in the background, warmed up, and only then published, all in one assignment: a request
meets the old ones or the new ones. Replaced versions end what they have accepted and are unloaded then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

from penstock.classic.base import InferModel
from penstock.classic.caching.cache import CacheCounters, ResponseCache
from penstock.classic.messages import InferRequest
from penstock.engines.errors import (
    AlreadyExistsError,
    EngineError,
    InvalidRequestError,
    NotReadyError,
    PenstockError,
    from_code,
)
from penstock.gateway.apis.kserve.store import IndexEntry, NotExplicitError
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.models.on_demand.on_demand import OnDemand
from penstock.gateway.models.repository.config_file import check_files, write_files
from penstock.gateway.models.repository.host import MetricFamilies, RepositoryHost
from penstock.gateway.models.repository.known_models import KnownModels
from penstock.gateway.models.repository.layout import check_model_name
from penstock.gateway.models.repository.listing import DUPLICATE, DuplicateModelError, RepositoryListing
from penstock.gateway.models.repository.loading import (
    EnsembleLoader,
    LoadError,
    Loaders,
    ModelLoading,
    load_failures,
    poll_error,
    poll_failure,
)
from penstock.gateway.models.repository.models import (
    UNLOADED,
    Dependencies,
    LoadedVersions,
    ModelEntry,
    VersionStatus,
    composing,
    wire_again,
)
from penstock.gateway.models.repository.on_demand_loads import OnDemandLoads
from penstock.gateway.models.repository.operations import STOPPING, Operations, poll_forever
from penstock.gateway.models.repository.settings import ALL_MODELS, RepositorySettings
from penstock.gateway.models.repository.storage import LocalModel, Repository
from penstock.gateway.requests.loading_board import LoadingBoard

logger = logging.getLogger("penstock")


class ModelRepository:
    """The ModelStore of a server; `host` is what its models may ask. Lives on the event loop.

    `loaders` gives the loader for a backend's name and raises ValueError for unknown ones; what serves is in
    `catalogue`; `metrics` keeps those that models report; `cache` keeps responses of models that ask for it, and is
    closed at the end; `observe` is called with each model version before it serves. `on_demand` is there where requests
    load models; `generating`: as OnDemandLoads has it.
    """

    def __init__(
        self,
        settings: RepositorySettings,
        loaders: Loaders,
        repositories: Sequence[Repository],
        *,
        catalogue: Catalogue | None = None,
        metrics: MetricFamilies | None = None,
        board: LoadingBoard | None = None,
        cache: ResponseCache | None = None,
        observe: Callable[[InferModel], None] | None = None,
        on_demand: OnDemand | None = None,
        generating: Sequence[str] = (),
    ) -> None:
        self._settings = settings
        self._on_demand = on_demand
        self._cache = cache
        self._observe = observe
        self._catalogue = Catalogue(board, on_demand) if catalogue is None else catalogue
        self.host = RepositoryHost(self, metrics, self._catalogue.use_for_model)
        self._listing = RepositoryListing(repositories)
        ensembles = EnsembleLoader(self, self._load_composing)
        self._loading = ModelLoading(settings, loaders, self.host, ensembles, cache, observe)
        self._known = KnownModels(self._listing, self._catalogue, board or LoadingBoard())
        self._dependencies = Dependencies(self._catalogue.deployment)
        self._kept: frozenset[str] = frozenset()
        """Loaded at the start: loading on demand does not unload them."""
        self._implied: set[str] = set()
        """Loaded for an ensemble only."""
        self._requested: set[str] = set()
        """What strict readiness waits for."""
        self._started = False
        self._stopping = False
        self._poller: asyncio.Task[None] | None = None
        self._operations = Operations()
        self._drains: set[asyncio.Task[None]] = set()
        self._revivals: set[asyncio.Task[None]] = set()
        self._demand_loads = OnDemandLoads(self, self._listing, self._loading.slots, settings, generating)
        if on_demand is not None:
            on_demand.attach(self._demand_loads)

    # What serves

    def model(self, name: str, version: str = "", request: InferRequest | None = None) -> InferModel:
        serving = self._catalogue.deployment(name)
        model = None if serving is None else serving.by_version.get(version)
        if model is None:
            raise self._known.missing(name, version)
        return model

    def versions(self, name: str) -> list[int]:
        return self._known.versions(name)

    def models(self) -> Iterable[InferModel]:
        return self._known.models()

    def load_seconds(self) -> dict[tuple[str, int], float]:
        """How long each version of the repositories that serves took to load, by name and version."""
        return self._known.load_seconds()

    def index(self, *, ready: bool) -> list[IndexEntry]:
        self._listing.refresh_local()
        return self._known.index(ready=ready)

    def cache_counters(self) -> CacheCounters | None:
        """Of a response cache that is in this process."""
        return self._cache.counters if self._cache is not None else None

    @property
    def ready(self) -> bool:
        if not self._started or self._stopping:
            return False
        if not self._settings.strict_readiness:
            return True
        needed = map(self.deployment, (*self._requested, *self._known.added))
        return not self._settings.missing and all(serving is not None and serving.reports_ready for serving in needed)

    def add(self, model: InferModel) -> None:
        """A model that belongs to no repository: its owner starts and stops it. Raises AlreadyExistsError."""
        name = model.name
        if self.deployment(name) is not None or name in self._known.entries or name in self._listing.names:
            raise AlreadyExistsError(f"there is already a model '{name}'")
        if self._observe is not None:
            self._observe(model)
        self._known.added.add(name)
        self._catalogue.publish(name, LoadedVersions({model.version: model}))

    # What changes it

    async def start(self) -> None:
        """Loads what the control mode says. Raises PenstockError: a repository that cannot be read, an added model's
        name in it, a cache that refuses us, and, with `exit_on_error`, models that cannot be loaded; `stop` has to
        follow then."""
        if self._cache is not None:
            await self._cache.start()
        await asyncio.to_thread(self._listing.refresh)
        if taken := sorted(self._known.added & self._listing.names):
            raise AlreadyExistsError(f"model '{taken[0]}' is in a model repository, too: it needs another name")
        if self._on_demand is not None:
            await self._demand_loads.look()
            self._on_demand.start()
        names = self._first_models()
        self._requested = set(names)
        self._kept = frozenset(names)
        loads = [self._operations.run(name, self._load_stored(name)) for name in names]
        results = await asyncio.gather(*loads, return_exceptions=True)
        failed = {
            name: result for name, result in zip(names, results, strict=True) if isinstance(result, BaseException)
        }
        if failed and self._settings.exit_on_error:
            raise EngineError(load_failures({name: self._known.reason(name, error) for name, error in failed.items()}))
        self._started = True
        if self._settings.control_mode == "poll":
            self._poller = asyncio.create_task(poll_forever(self.poll, self._settings.poll_seconds))

    async def stop(self) -> None:
        """Ends what is being loaded, lets the models of the repositories end what they have accepted, unloads them.

        Cancelling it ends what they still run."""
        self._stopping = True
        if self._on_demand is not None:
            await self._on_demand.stop()
        tasks = [*self._operations.under_way, *([self._poller] if self._poller is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for entry in self._known.entries.values():
            self._withdraw(entry)
        await asyncio.gather(*self._drains)
        if self._cache is not None:
            await self._cache.close()

    async def load(self, name: str, *, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        self._check_change(name)
        check_model_name(name)
        self._implied.discard(name)
        if self._on_demand is not None:
            self._on_demand.asked_for(name)
        if not files:
            await self._operations.request(name, self._load_stored(name, config))
        elif config is None:
            raise poll_error(name, InvalidRequestError("files need a configuration with them"))
        else:
            try:
                check_files(files)
            except InvalidRequestError as error:
                raise poll_error(name, error) from None
            await self._operations.request(name, self._load_files(name, config, files))
        await self._revived()

    async def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        """Of an ensemble, `unload_dependents` unloads the models, too, that were loaded only for it, as in Triton."""
        self._check_change(name)
        held_out = [name, *self._known.all_ensembles_of(name)]
        self._hold_out(held_out)
        if name not in self._known.entries:
            self._requested.discard(name)
            return
        models = composing(self.deployment(name)) & self._implied
        await self._operations.request(name, self._unload(self._known.entries[name]))
        self._hold_out(held_out)  # it may have been loaded meanwhile
        if unload_dependents:
            for model in sorted(models - self._known.used()):
                await self._operations.request(model, self._unload(self._known.entries[model]))

    # What loading on demand needs, beside `load_stored`

    def deployment(self, name: str) -> LoadedVersions | None:
        return self._catalogue.deployment(name)

    def is_changing(self, name: str) -> bool:
        entry = self._known.entries.get(name)
        return name in self._dependencies.needed_by_loads() or (entry is not None and entry.lock.locked())

    async def load_stored(self, name: str) -> None:
        """Returns when the model serves. Raises PenstockError, with a message for every caller."""
        try:
            await self._operations.request(name, self._load_stored(name))
        except PenstockError as error:
            public = self._known.public_reason(name)
            if public is None:
                raise
            raise from_code(error.code, public) from error

    def retire(self, name: str, reason: str) -> Awaitable[None]:
        """From the call on nobody finds the model, nor the ensembles that it is part of; to be awaited until what was
        accepted has ended and it is unloaded."""
        before = set(self._drains)
        if (entry := self._known.entries.get(name)) is not None:
            self._requested.discard(name)
            self._dependencies.forget(name)
            self._withdraw(entry, reason)
        return _all_done(self._drains - before)

    async def poll(self) -> None:
        """Loads what is new or has changed, unloads what is gone. Raises EngineError when a repository cannot be read:
        nothing changes then."""
        await asyncio.to_thread(self._listing.refresh)
        present = self._listing.names
        for name in present & self._known.added:
            logger.error("model '%s' is in a model repository, too: it needs another name", name)
        present -= self._known.added
        gone = [entry for name, entry in self._known.entries.items() if name not in present]
        await asyncio.gather(
            *(self._operations.run(name, self._load_stored(name, only_changed=True)) for name in sorted(present)),
            *(self._operations.run(entry.name, self._unload(entry)) for entry in gone),
            return_exceptions=True,
        )
        for entry in gone:
            if not entry.versions:
                del self._known.entries[entry.name]
        self._requested = present

    # Loads and unloads, one at a time for a model

    async def _load_stored(self, name: str, config: str | None = None, *, only_changed: bool = False) -> None:
        """`only_changed`, for polls: files that could not be loaded are not tried again, and a second model of the name
        makes the first unavailable, while a load request that finds one leaves what serves alone, as in Triton."""
        try:
            repository = await asyncio.to_thread(self._listing.find, name)
        except DuplicateModelError:
            entry = self._known.entry(name)
            async with entry.lock:
                if only_changed:
                    self._withdraw(entry, DUPLICATE)
                entry.failed(DUPLICATE, {})
            raise
        except EngineError as error:  # the repositories cannot be read
            raise poll_error(name, error) from error
        entry = self._known.entry(name)
        async with entry.lock:
            try:
                fingerprint = await asyncio.to_thread(repository.fingerprint, name)
            except PenstockError as error:
                entry.tried = None
                raise _failed(entry, poll_failure(name, error)) from error
            if config is not None:
                await self._replace(entry, partial(repository.fetch, name), config, None)
            elif entry.unchanged(fingerprint):
                entry.confirmed()
            elif not only_changed or entry.tried != fingerprint:
                await self._replace(entry, partial(repository.fetch, name), None, fingerprint)

    async def _load_files(self, name: str, config: str, files: Mapping[str, bytes]) -> None:
        entry = self._known.entry(name)
        async with entry.lock:
            await self._replace(entry, partial(write_files, files), config, None)

    async def _replace(
        self, entry: ModelEntry, fetch: Callable[[], LocalModel], config: str | None, fingerprint: str | None
    ) -> None:
        try:
            deployment = await self._loading.load(entry.name, fetch, config, entry.loading)
        except LoadError as failure:
            entry.tried = fingerprint
            raise _failed(entry, failure) from failure
        finally:
            self._dependencies.end(entry.name)
        old = entry.loaded
        retired = entry.published(deployment, fingerprint)
        self._catalogue.publish(entry.name, deployment)
        self._dependencies.published(entry.name, deployment)
        self._requested.add(entry.name)
        if self._on_demand is not None:
            # what did not come from the repository could not be loaded again as it is
            kept = entry.name in self._kept or fingerprint is None
            took = max(deployment.load_seconds.values())
            self._on_demand.loaded(entry.name, took, composing(deployment), kept=kept)
        if old is not None:
            self._drain(entry.name, old, retired, UNLOADED)
        versions = ", ".join(map(str, sorted(deployment.models)))
        logger.info("model '%s' is ready (%s)", entry.name, versions)
        self._adapt_ensembles(entry.name)

    async def _unload(self, entry: ModelEntry) -> None:
        async with entry.lock:
            self._requested.discard(entry.name)
            self._dependencies.forget(entry.name)
            self._withdraw(entry)

    def _withdraw(self, entry: ModelEntry, reason: str = UNLOADED) -> None:
        """From now on nobody finds the model, nor the ensembles that it is part of; what was accepted goes on."""
        old = entry.loaded
        if old is not None:
            for ensemble in self._known.ensembles_of(entry.name):
                self._withdraw_ensemble(ensemble, f"its model '{entry.name}' was unloaded")
            self._catalogue.publish(entry.name, None)
            if self._on_demand is not None:
                self._on_demand.left(entry.name)
            self._drain(entry.name, old, entry.withdrawn(), reason)

    def _drain(self, name: str, old: LoadedVersions, retired: Sequence[VersionStatus], reason: str) -> None:
        task = asyncio.create_task(self._stop_old(name, old, retired, reason))
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)

    async def _stop_old(self, name: str, old: LoadedVersions, retired: Sequence[VersionStatus], reason: str) -> None:
        """When no ensemble needs it any more. Cancelling it ends what it still runs."""
        try:
            await self._dependencies.settled(name)
        finally:
            await _stop(old, retired, reason)
            self._dependencies.stopped(old)

    # Ensembles

    async def _load_composing(self, ensemble: str, models: frozenset[str]) -> None:
        """Raises InvalidRequestError, in Triton's words, when one of an ensemble's models cannot be had."""
        self._dependencies.begin(ensemble, models)
        explicit = self._settings.control_mode == "explicit"
        await asyncio.to_thread(self._listing.refresh)
        unknown = sorted(models - self._listing.names - self._known.added)
        for name in filter(self.host.is_public, unknown):
            message = (
                f"ensemble {ensemble}: '{name}' is a name with traffic rules, which no step can have; name a model"
            )
            raise InvalidRequestError(message)
        if unknown:
            raise InvalidRequestError(
                f"ensemble {ensemble} contains models that are not available or ambiguous: {', '.join(unknown)}"
            )
        names = [name for name in sorted(models - self._known.added) if self.deployment(name) is None or not explicit]
        if explicit:
            self._implied.update(name for name in names if name not in self._requested)
        with self._on_demand.together(models) if self._on_demand is not None else nullcontext():
            loads = [self._operations.run(name, self._load_stored(name, only_changed=not explicit)) for name in names]
        results = dict(zip(names, await asyncio.gather(*loads, return_exceptions=True), strict=True))
        for name in sorted(models):
            if self.deployment(name) is None:
                known = self._known.entries[name].reason if name in self._known.entries else ""
                reason = self._known.public_reason(name) or results.get(name) or known or "it is not loaded"
                raise InvalidRequestError(
                    f"ensemble '{ensemble}' depends on '{name}' which has no loaded version. Model '{name}' loading"
                    f" failed with error: {reason}"
                )

    def _adapt_ensembles(self, name: str) -> None:
        """A model serves, for the first time or in new versions: those made of it fit it, or serve no longer, and
        those that lacked only this one are loaded."""
        for model in sorted(composing(self.deployment(name))):
            if self.deployment(model) is None:  # unloaded while this ensemble was being loaded
                self._withdraw_ensemble(name, f"its model '{model}' was unloaded")
                return
        self._wire_ensembles_of(name)
        for ensemble in self._dependencies.complete_with(name):
            self._revivals.add(task := self._operations.start(ensemble, self._load_stored(ensemble)))
            task.add_done_callback(self._revivals.discard)

    def _wire_ensembles_of(self, name: str) -> None:
        """Those above them, too: an ensemble is decoupled when one of its models is."""
        for ensemble in self._known.ensembles_of(name):
            deployment = self.deployment(ensemble)
            if deployment is None:  # withdrawn with another ensemble that it is made of, too
                continue
            try:
                wire_again(deployment)
            except PenstockError as error:
                logger.error("ensemble '%s' no longer serves: %s", ensemble, error)
                self._withdraw_ensemble(ensemble, error.message)
            else:
                self._wire_ensembles_of(ensemble)

    async def _revived(self) -> None:
        """Returns when the ensembles that a load has made possible are loaded."""
        if self._revivals:
            await asyncio.wait(self._revivals)

    def _withdraw_ensemble(self, name: str, reason: str) -> None:
        """Nothing happens if it has gone already, with another ensemble that it is made of, too."""
        if self.deployment(name) is None:
            return
        self._dependencies.lost(name, composing(self.deployment(name)))
        self._requested.discard(name)
        self._withdraw(self._known.entries[name], reason)

    def _hold_out(self, names: Sequence[str]) -> None:
        """Requests load them no more."""
        if self._on_demand is not None:
            self._on_demand.hold_out(set(names) & self._listing.names)

    # Details

    def _check_change(self, name: str) -> None:
        if self._settings.control_mode != "explicit":
            raise NotExplicitError
        if self._stopping:
            raise NotReadyError(STOPPING)
        if name in self._known.added:
            raise InvalidRequestError(
                f"model '{name}' does not come from a model repository: it cannot be loaded or unloaded"
            )

    def _first_models(self) -> list[str]:
        if self._settings.control_mode == "explicit" and ALL_MODELS not in self._settings.load_models:
            return sorted(set(self._settings.load_models))
        return sorted(self._listing.names)


def _failed(entry: ModelEntry, failure: LoadError) -> PenstockError:
    """Notes why; returns what the caller is told."""
    entry.failed(failure.reason, failure.versions, failure.public)
    return failure.error


async def _all_done(tasks: Collection[asyncio.Task[None]]) -> None:
    if tasks:
        await asyncio.wait(tasks)  # they go on if this is cancelled


async def _stop(old: LoadedVersions, retired: Sequence[VersionStatus], reason: str) -> None:
    await old.stop()
    for status in retired:
        status.become("UNAVAILABLE", reason)
