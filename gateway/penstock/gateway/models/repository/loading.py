"""Loads, from a model's folder to versions that are ready to serve: configuration, backend, load, warm-up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.classic.base import Host, InferModel, ModelContext, abandoned
from penstock.classic.caching.cache import ResponseCache
from penstock.classic.caching.cached_model import CachedModel, EnsembleIdentity, content_identity, loaded_identity
from penstock.classic.ensemble.model import EnsembleModel
from penstock.classic.ensemble.plan import is_ensemble, make_plan
from penstock.classic.model_config import ModelConfig
from penstock.engines.errors import InvalidRequestError, PenstockError, UnsupportedError, from_code
from penstock.engines.host.failure_text import as_load_error, one_line, reason
from penstock.gateway.apis.kserve.classification import read_labels
from penstock.gateway.apis.kserve.store import ModelStore
from penstock.gateway.errors import wire_shape
from penstock.gateway.models.repository.batching_checks import check_strategy
from penstock.gateway.models.repository.config_checks import check_supported
from penstock.gateway.models.repository.config_file import read_config
from penstock.gateway.models.repository.defaults import complete
from penstock.gateway.models.repository.layout import ModelFileError, available_versions, select_versions
from penstock.gateway.models.repository.models import UNLOADED, LoadedVersions, close_folder, stop_models
from penstock.gateway.models.repository.settings import RepositorySettings
from penstock.gateway.models.repository.storage import LocalModel
from penstock.gateway.models.repository.warmup import warm_up

logger = logging.getLogger("penstock")


class Completer(Protocol):
    """What of a backend completes configurations."""

    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        """Fills in, in place, what the configuration leaves out. In a thread. Raises ValueError, PenstockError."""
        ...


class Loader(Completer, Protocol):
    """Loads the models of one backend."""

    async def load(self, context: ModelContext) -> InferModel:
        """A version that is ready. When cancelled it leaves nothing behind. Raises ValueError, PenstockError."""
        ...


class Loaders(Protocol):
    def __call__(self, backend: str, folder: Path | None = None) -> Loader:
        """The loader for a backend's name; `folder` is the model's, which may have a backend of its own. In a thread.

        Raises ValueError for unknown names.
        """
        ...


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A model whose configuration is supported as far as it is written."""

    folder: Path
    config: ModelConfig


def plan_model(settings: RepositorySettings, name: str, folder: Path, override: str | None = None) -> ModelPlan:
    """`override` is a load request's configuration. Raises ValueError, PenstockError."""
    config = read_config(folder, name, override=override, config_name=settings.config_name)
    complete(config, name, folder, gpus=settings.gpus)
    check_supported(config, complete=False)
    for output in config.output:
        if output.label_filename:
            read_labels(folder, output.label_filename)
    return ModelPlan(folder, config)


def version_config(
    settings: RepositorySettings, plan: ModelPlan, version: int, backend: Completer | None
) -> ModelConfig:
    """The configuration of one version, with what its backend fills in; ensembles have none.

    Raises ValueError, PenstockError.
    """
    config = ModelConfig()
    config.CopyFrom(plan.config)
    if settings.auto_complete and backend is not None:
        backend.auto_complete(config, plan.folder / str(version))
        complete(config, config.name, plan.folder, gpus=settings.gpus)
    check_supported(config)
    check_strategy(config, plan.folder, plan.folder / str(version))
    return config


_held: ContextVar[bool] = ContextVar("holds_load_slot", default=False)


class LoadSlots:
    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """For the block, waiting for its turn."""
        async with self._free:
            token = _held.set(True)
            try:
                yield
            finally:
                _held.reset(token)

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Another one may have the current task's slot for the block, if it has one: it waits for what others do."""
        if not _held.get():
            yield
            return
        self._free.release()
        try:
            yield
        finally:
            await self._free.acquire()


_STATUS = {"UNIMPLEMENTED": "Unsupported"}
"""Triton's names of codes that are not those of gRPC."""

_Loaded = tuple[InferModel, float]
"""A version, and the seconds it took."""


class LoadError(Exception):
    """A model could not be loaded: what its caller is told, the reason, and that of each version if it came so far."""

    def __init__(
        self, error: PenstockError, reason: str, versions: Mapping[int, str] | None = None, public: str | None = None
    ) -> None:
        """`public`: the reason for callers who may not administer, where it is another."""
        super().__init__(reason)
        self.error = error
        self.reason = reason
        self.versions = versions or {}
        self.public = public


@dataclass(frozen=True, slots=True)
class _Plan:
    model: ModelPlan
    versions: Sequence[int]
    loader: Loader


LoadComposing = Callable[[str, frozenset[str]], Awaitable[None]]
"""Sees to it that these models serve, for the ensemble of this name. Raises InvalidRequestError."""


class EnsembleLoader:
    """A Loader."""

    def __init__(self, store: ModelStore, load_composing: LoadComposing) -> None:
        self._store = store
        self._load_composing = load_composing

    async def prepare(self, config: ModelConfig) -> None:
        """Loads the models of an ensemble. Raises InvalidRequestError."""
        await self._load_composing(config.name, make_plan(config).models)

    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        """An ensemble's configuration is complete."""

    async def load(self, context: ModelContext) -> InferModel:
        return EnsembleModel(context, self._find)

    def _find(self, name: str, version: int) -> InferModel:
        return self._store.model(name, "" if version == -1 else str(version))


class ModelLoading:
    """Loads whole models, all versions or none. At most `load_threads` versions are worked on at the same time."""

    def __init__(
        self,
        settings: RepositorySettings,
        loaders: Loaders,
        host: Host,
        ensembles: EnsembleLoader,
        cache: ResponseCache | None = None,
        observe: Callable[[InferModel], None] | None = None,
    ) -> None:
        """`observe` is called with each version that is loaded and warmed up."""
        self._settings = settings
        self._loaders = loaders
        self._ensembles = ensembles
        self._host = host
        self._cache = cache
        self._observe = observe
        self.slots = LoadSlots(settings.load_threads)

    async def load(
        self,
        name: str,
        fetch: Callable[[], LocalModel],
        config: str | None,
        on_versions: Callable[[Sequence[int]], None],
    ) -> LoadedVersions:
        """`fetch` brings the files, in a thread; `config` replaces the configuration file; `on_versions` is told what
        will be loaded. Raises LoadError."""
        folder: LocalModel | None = None
        try:
            async with self.slots.one():
                folder = await _fetched(fetch)
                plan = await asyncio.to_thread(self._plan, name, folder.folder, config)
            if is_ensemble(plan.model.config):
                await self._prepare_ensemble(name, plan.model.config)
            on_versions(plan.versions)
            deployment = await self._load_versions(name, plan, folder)
            folder = None
            return deployment
        except LoadError:
            raise
        except Exception as error:
            raise poll_failure(name, error) from error
        finally:
            if folder is not None:
                await close_folder(folder)

    def _plan(self, name: str, folder: Path, override: str | None) -> _Plan:
        plan = plan_model(self._settings, name, folder, override)
        try:
            versions = select_versions(plan.config.version_policy, available_versions(folder), name)
        except InvalidRequestError as error:
            failure = InvalidRequestError(f"load failed for model '{name}': {error.message}")
            raise LoadError(failure, error.message) from None
        loader = self._ensembles if is_ensemble(plan.config) else self._loaders(plan.config.backend, folder)
        return _Plan(plan, versions, loader)

    async def _prepare_ensemble(self, name: str, config: ModelConfig) -> None:
        try:
            await self._ensembles.prepare(config)
        except InvalidRequestError as error:
            message = f"load failed for model '{name}': {error.message}"
            raise LoadError(InvalidRequestError(message), error.message) from None

    async def _load_versions(self, name: str, plan: _Plan, folder: LocalModel) -> LoadedVersions:
        tasks = {version: asyncio.create_task(self._load_version(name, plan, version)) for version in plan.versions}
        try:
            await asyncio.wait(tasks.values())
        except asyncio.CancelledError:
            for task in tasks.values():
                task.cancel()
            await asyncio.wait(tasks.values())
            await stop_models(model for model, _ in _results(tasks).values())
            raise
        loaded = _results(tasks)
        models = {version: model for version, (model, _) in loaded.items()}
        if len(models) < len(tasks):
            await stop_models(models.values())
            raise _load_error(name, plan.model.config.backend, tasks)
        return LoadedVersions(models, folder, {version: seconds for version, (_, seconds) in loaded.items()})

    async def _load_version(self, name: str, plan: _Plan, version: int) -> _Loaded:
        attempts = self._settings.load_retries
        async with self.slots.one():
            while True:
                started = time.monotonic()
                try:
                    return await self._attempt(name, plan, version), time.monotonic() - started
                except Exception as error:
                    if attempts == 0:
                        raise
                    attempts -= 1
                    logger.warning("model '%s' version %d is tried again after: %s", name, version, reason(error))

    async def _attempt(self, name: str, plan: _Plan, version: int) -> InferModel:
        config = await self._completed(plan, version)
        context = ModelContext(
            name=name,
            version=version,
            config=config,
            model_folder=plan.model.folder,
            version_folder=plan.model.folder / str(version),
            host=self._host,
        )
        model = await plan.loader.load(context)
        try:
            await warm_up(model, plan.model.folder)
            served = await self._cached(model, context) if config.response_cache.enable else model
        except BaseException:
            await stop_models([model])
            raise
        if self._observe is not None:
            self._observe(model)
        return served

    async def _completed(self, plan: _Plan, version: int) -> ModelConfig:
        gone: Future[None] = Future()
        abandoned.set(gone)
        try:
            return await asyncio.to_thread(version_config, self._settings, plan.model, version, plan.loader)
        except asyncio.CancelledError:
            gone.set_result(None)
            raise

    async def _cached(self, model: InferModel, context: ModelContext) -> InferModel:
        if self._cache is None:
            logger.warning("model '%s' asks for a response cache, and the server has none (--cache-config)", model.name)
            return model
        if isinstance(model, EnsembleModel):
            return CachedModel(model, self._cache, self._identity_of(model, self._cache))
        shared = self._cache.shared
        identity = await asyncio.to_thread(content_identity, context) if shared else loaded_identity()
        return CachedModel(model, self._cache, lambda: identity)

    @staticmethod
    def _identity_of(ensemble: EnsembleModel, cache: ResponseCache) -> EnsembleIdentity:
        if cache.shared:
            raise UnsupportedError(
                f"response_cache.enable of ensemble '{ensemble.name}' is not supported with a cache that servers"
                " share: enable it for its models",
                param="response_cache.enable",
            )
        return EnsembleIdentity(ensemble)


def poll_error(name: str, error: PenstockError) -> PenstockError:
    """What the caller of a load is told when it is not known yet what there is to load: Triton's words, and why."""
    return from_code(error.code, f"failed to load '{name}', failed to poll from model repository: {error.message}")


def poll_failure(name: str, error: Exception) -> LoadError:
    """Of a model whose files or configuration cannot be taken."""
    refusal = _refusal(error)
    public = one_line(error.public) if isinstance(error, ModelFileError) else None
    return LoadError(poll_error(name, refusal), refusal.message, public=public)


def load_failures(reasons: Mapping[str, str]) -> str:
    """What a server that ends because of them says: Triton's words, and a line for each model."""
    lines = [f"  {name}: {reason}" for name, reason in reasons.items()]
    return "\n".join(["failed to load all models; --exit-on-error=false serves the others:", *lines])


def _results(tasks: Mapping[int, asyncio.Task[_Loaded]]) -> dict[int, _Loaded]:
    return {version: task.result() for version, task in tasks.items() if _error(task) is None}


def _error(task: asyncio.Task[_Loaded]) -> BaseException | None:
    return asyncio.CancelledError() if task.cancelled() else task.exception()


def _load_error(name: str, backend: str, tasks: Mapping[int, asyncio.Task[_Loaded]]) -> LoadError:
    """What went wrong, in Triton's words, and as in Triton the request's fault, whatever it was. Versions that could
    have been served are unloaded again."""
    failures: dict[int, PenstockError] = {}
    for version, task in tasks.items():
        if (error := _error(task)) is not None:
            failures[version] = _refusal(error, backend)
    reasons = {version: _status(failures[version]) if version in failures else UNLOADED for version in tasks}
    summary = " ".join(f"version {version} is at UNAVAILABLE state: {reasons[version]};" for version in failures)
    first = next(iter(failures.values()))
    code = first.code if isinstance(first, InvalidRequestError) else InvalidRequestError.code
    return LoadError(from_code(code, f"load failed for model '{name}': {summary}"), summary, reasons)


def _status(error: PenstockError) -> str:
    """As Triton shows a status: `Internal: what happened`."""
    code = wire_shape(error).grpc
    return f"{_STATUS.get(code, code.replace('_', ' ').capitalize())}: {error.message}"


def _refusal(error: BaseException, backend: str = "") -> PenstockError:
    """What a caller is told, in one line."""
    if isinstance(error, ValueError):
        return InvalidRequestError(one_line(str(error)))
    return as_load_error(error, {"backend": backend} if backend else None)


async def _fetched(fetch: Callable[[], LocalModel]) -> LocalModel:
    """What `fetch` brings; given up again when nobody waits any more."""
    fetching = asyncio.ensure_future(asyncio.to_thread(fetch))
    try:
        return await asyncio.shield(fetching)
    except asyncio.CancelledError:
        fetching.add_done_callback(lambda done: None if done.cancelled() or done.exception() else done.result().close())
        raise
