"""The models of a server, from its configuration: data plane, repositories, and what they share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penstock.classic.base import InferModel
from penstock.classic.loading import backend_names
from penstock.engines import __version__
from penstock.engines.door.spec import DoorSpec
from penstock.engines.errors import InvalidRequestError
from penstock.engines.host.gpus import visible_gpus
from penstock.gateway.apis.pooling.kserve_model import unloaded_config
from penstock.gateway.configuration.config import Config, ConfigError
from penstock.gateway.configuration.sections.other_models import RepositoryConfig
from penstock.gateway.metrics.custom import CustomMetrics
from penstock.gateway.metrics.machine import GpuMetrics
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.models.language.hub import fetch_draft_model, fetch_model
from penstock.gateway.models.language.kserve.folder_layout import check_installed
from penstock.gateway.models.language.kserve.loader import LANGUAGE_BACKENDS, language_loaders
from penstock.gateway.models.language.model_builder import build_model
from penstock.gateway.models.language.models import LoadedModel, find_model, is_hub_id
from penstock.gateway.models.memory.budget import MemoryBudget
from penstock.gateway.models.on_demand.loads import OnDemandSettings
from penstock.gateway.models.on_demand.on_demand import OnDemand
from penstock.gateway.models.pooling.plane import PoolingPlane
from penstock.gateway.models.repository.checking import RepositoryCheck, Verdict
from penstock.gateway.models.repository.classic_loader import ClassicLoaders
from penstock.gateway.models.repository.loading import Loader, Loaders
from penstock.gateway.models.repository.manager import ModelRepository
from penstock.gateway.models.repository.settings import RepositorySettings, build_cache, build_rate_limiter
from penstock.gateway.models.repository.storage import Repository
from penstock.gateway.models.upstream.lazy import UPSTREAM_BACKEND, LazyUpstreams
from penstock.gateway.requests.intake import WorkPools
from penstock.gateway.requests.loading_board import LoadingBoard

logger = logging.getLogger(__name__)


def build_on_demand(config: Config) -> OnDemand | None:
    """Raises ConfigError for options that do not fit together."""
    repository = config.repository
    if not repository.load_on_demand:
        usual = RepositoryConfig()
        for name in ("load_on_demand_wait", "load_on_demand_queue", "unload_after_idle"):
            if getattr(repository, name) != getattr(usual, name):
                raise ConfigError(f"{name.replace('_', '-')}: needs --load-on-demand")
        return None
    if repository.model_control_mode != "explicit":
        raise ConfigError("load-on-demand: needs --model-control-mode=explicit")
    return OnDemand(
        OnDemandSettings(
            wait_seconds=repository.load_on_demand_wait,
            most_waiting=repository.load_on_demand_queue,
            idle_seconds=repository.unload_after_idle,
        )
    )


def build_dataplane(
    config: Config, pools: WorkPools, board: LoadingBoard, on_demand: OnDemand | None = None
) -> DataPlane:
    return DataPlane(
        Catalogue(board, on_demand),
        request_timeout=config.scheduling.request_timeout or None,
        clamp_max_tokens=config.server.clamp_max_tokens,
        text_pool=pools.text,
    )


def build_upstreams(config: Config, models: Catalogue) -> LazyUpstreams:
    return LazyUpstreams(config, models, __version__)


def build_pooling(config: Config, models: Catalogue, pools: WorkPools) -> PoolingPlane:
    return PoolingPlane(models, request_timeout=config.scheduling.request_timeout or None, text_pool=pools.text)


def build_budget(config: Config, gpus: GpuMetrics) -> MemoryBudget:
    """What all language models of the server may take. Raises ConfigError."""
    try:
        return MemoryBudget(config.server.memory_limit, gpus.memory)
    except InvalidRequestError as error:
        raise ConfigError(f"memory-limit: {error.message}") from None


def build_repository(
    config: Config,
    dataplane: DataPlane,
    metrics: CustomMetrics,
    budget: MemoryBudget,
    board: LoadingBoard,
    upstreams: LazyUpstreams,
    observe: Callable[[InferModel], None] | None = None,
    on_demand: OnDemand | None = None,
    new_door: Callable[[], DoorSpec] | None = None,
) -> ModelRepository:
    """The models of the repositories, classic ones and language models; `observe` is called with each before it serves.
    `new_door`: as for `build_model`.

    Raises ConfigError.
    """
    settings = repository_settings(config.repository, config.server.crash_folder)
    if on_demand is not None:
        budget.make_room = on_demand.make_room
    loader = _loaders(config, settings, dataplane, budget, board, upstreams, new_door)
    cache = build_cache(config.repository.cache_config, config.repository.response_cache_byte_size)
    repositories, missing = _repositories(config)
    return ModelRepository(
        replace(settings, missing=missing),
        loader,
        repositories,
        catalogue=dataplane.models,
        metrics=metrics,
        board=board,
        cache=cache,
        observe=observe,
        on_demand=on_demand,
        generating=(*LANGUAGE_BACKENDS, UPSTREAM_BACKEND),
    )


def check_models(config: Config, gpus: int | None) -> list[Verdict]:
    """What would become of the repositories' models, on a machine with so many GPUs (None: those that are there).
    Raises ConfigError, EngineError."""
    settings = repository_settings(config.repository)
    if gpus is not None:
        settings = replace(settings, gpus=gpus)
    board = LoadingBoard()
    dataplane = build_dataplane(config, WorkPools(), board)
    upstreams = build_upstreams(config, dataplane.models)
    backends = _loaders(config, settings, dataplane, build_budget(config, GpuMetrics()), board, upstreams)
    cache = build_cache(config.repository.cache_config, config.repository.response_cache_byte_size)
    limits_rates = config.repository.rate_limit != "off"
    beside = [unloaded_config(name) for name in embedding_names(config)]
    check = RepositoryCheck(settings, backends, has_cache=cache is not None, limits_rates=limits_rates, beside=beside)
    return check.verdicts(_repositories(config)[0])


def embedding_names(config: Config) -> list[str]:
    """Of --embedding-model. Raises ConfigError."""
    names = []
    for text in config.embeddings.embedding_model:
        name, equals, _ = text.partition("=")
        names.append(name if equals or is_hub_id(text) else find_model(text).name)
    return names


def _loaders(
    config: Config,
    settings: RepositorySettings,
    dataplane: DataPlane,
    budget: MemoryBudget,
    board: LoadingBoard,
    upstreams: LazyUpstreams,
    new_door: Callable[[], DoorSpec] | None = None,
) -> Loaders:
    """By the backend's name."""
    limiter = build_rate_limiter(config.repository.rate_limit, config.repository.rate_limit_resource)
    counted = budget if config.repository.load_on_demand else None
    if settings.backend_options.get(UPSTREAM_BACKEND):
        raise ConfigError(f"backend-config: the backend {UPSTREAM_BACKEND} has no settings")
    classic = ClassicLoaders(settings.backend_options, limiter, counted)

    async def build(own: Config, name: str) -> LoadedModel:
        check_installed(own.model.engine)
        report = board.reporter([name])
        try:
            source = await fetch_model(own.model.model, report, own.model.revision)
            own = await fetch_draft_model(own, report)
        finally:
            report(None)
        # in a thread: a large tokenizer takes its time
        return await asyncio.to_thread(build_model, own, source, [name], budget, board, new_door)

    language = language_loaders(config, dataplane, build, settings.backend_options)

    def loader(backend: str, folder: Path | None = None) -> Loader:
        if backend == UPSTREAM_BACKEND:
            return upstreams.loader()
        return language.get(backend) or classic(backend, folder)

    return loader


def _repositories(config: Config) -> tuple[list[Repository], tuple[str, ...]]:
    """Each place once, by whatever names it is given; and the folders that are not there, which end the start unless
    the operator says otherwise."""
    found: dict[object, Repository] = {}
    missing: list[str] = []
    for url in config.repository.model_repository:
        try:
            repository = Repository(url, config.repository.repository_links)
        except ConfigError as error:
            if config.repository.exit_on_error or "://" in url or Path(url).is_dir():
                raise ConfigError(f"model-repository: {error}") from None
            logger.error("%s; the server goes on without it (--exit-on-error=false)", error)
            missing.append(url)
        else:
            found.setdefault(_place(repository.url), repository)
    return list(found.values()), tuple(missing)


def _place(url: str) -> object:
    """The same for all names of a folder."""
    if "://" in url:
        return url
    info = Path(url).stat()
    return info.st_dev, info.st_ino


def repository_settings(config: RepositoryConfig, crash_folder: Path | None = None) -> RepositorySettings:
    """`crash_folder`: see `ServerConfig`. Raises ConfigError for options that do not fit together."""
    if config.load_model and config.model_control_mode != "explicit":
        raise ConfigError("load-model: needs --model-control-mode=explicit")
    options: dict[str, dict[str, str]] = {}
    for text in config.backend_config:
        head, equals, value = text.partition("=")
        backend, _, name = head.rpartition(",")  # without a backend: a setting of all of them
        if not equals or not name:
            raise ConfigError(f"backend-config: {text!r} is neither BACKEND,KEY=VALUE nor KEY=VALUE")
        known = {*backend_names(), *LANGUAGE_BACKENDS, UPSTREAM_BACKEND}
        if backend and backend not in known and not config.backend_directory:
            raise ConfigError(f"backend-config: no backend is called {backend!r}")
        options.setdefault(backend, {})[name] = value
    if config.backend_directory:
        options.setdefault("python", {}).setdefault("backend-directory", config.backend_directory)
    if crash_folder is not None:
        options.setdefault("python", {}).setdefault("crash-dir", str(crash_folder))
    return RepositorySettings(
        control_mode=config.model_control_mode,
        poll_seconds=config.repository_poll_secs,
        load_models=config.load_model,
        strict_readiness=config.strict_readiness,
        exit_on_error=config.exit_on_error,
        auto_complete=not config.disable_auto_complete_config,
        load_threads=config.model_load_thread_count,
        load_retries=config.model_load_retry_count,
        config_name=config.model_config_name,
        gpus=visible_gpus(),
        backend_options=options,
    )
