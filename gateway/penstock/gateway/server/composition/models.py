"""The models of a server, from its configuration: data plane, repositories, and what they share."""

from __future__ import annotations

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
from penstock.gateway.models.language.images.sources import ImageSources
from penstock.gateway.models.language.kserve.loader import LANGUAGE_BACKENDS, language_loaders
from penstock.gateway.models.language.model_builder import ModelBuilder
from penstock.gateway.models.language.shared_settings import settings_beside
from penstock.gateway.models.loader import LoadableModel, ModelLoader
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
        request_timeout=config.models.scheduling.request_timeout or None,
        clamp_max_tokens=config.server.clamp_max_tokens,
        text_pool=pools.text,
        image_sources=build_image_sources(config),
    )


def build_image_sources(config: Config) -> ImageSources:
    """Raises ConfigError."""
    if not config.server.allowed_media_domains:
        return ImageSources()
    from penstock.gateway.models.language.images.fetching import ImageFetcher, domain  # few servers fetch

    try:
        return ImageSources(ImageFetcher([domain(text) for text in config.server.allowed_media_domains]))
    except ValueError as error:
        raise ConfigError(f"allowed-media-domains: {error}") from None


def build_upstreams(config: Config, models: Catalogue) -> LazyUpstreams:
    return LazyUpstreams(config, models, __version__)


def build_pooling(config: Config, models: Catalogue, pools: WorkPools) -> PoolingPlane:
    return PoolingPlane(models, request_timeout=config.models.scheduling.request_timeout or None, text_pool=pools.text)


def build_budget(config: Config, gpus: GpuMetrics, on_demand: OnDemand | None = None) -> MemoryBudget:
    """What all language models of the server may take. Raises ConfigError."""
    try:
        budget = MemoryBudget(config.server.memory_limit, gpus.memory)
    except InvalidRequestError as error:
        raise ConfigError(f"memory-limit: {error.message}") from None
    if on_demand is not None:
        budget.make_room = on_demand.make_room
    return budget


def build_loader(
    config: Config,
    models: Catalogue,
    budget: MemoryBudget,
    board: LoadingBoard,
    new_door: Callable[[], DoorSpec] | None = None,
) -> ModelLoader:
    """`new_door`: see `ModelBuilder`."""
    return ModelLoader(ModelBuilder(config.server, budget, board, new_door), models, config.embeddings)


def build_repository(
    config: Config,
    settings: RepositorySettings,
    loaders: Loaders,
    catalogue: Catalogue,
    metrics: CustomMetrics,
    board: LoadingBoard,
    observe: Callable[[InferModel], None] | None = None,
    on_demand: OnDemand | None = None,
) -> ModelRepository:
    """The models of the repositories, classic ones and language models; `observe` is called with each before it serves.

    Raises ConfigError.
    """
    cache = build_cache(config.repository.cache_config, config.repository.response_cache_byte_size)
    repositories, missing = _repositories(config)
    return ModelRepository(
        replace(settings, missing=missing),
        loaders,
        repositories,
        catalogue=catalogue,
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
    budget = build_budget(config, GpuMetrics())
    loader = build_loader(config, dataplane.models, budget, board)
    backends = build_loaders(config, settings, loader, dataplane, budget, build_upstreams(config, dataplane.models))
    cache = build_cache(config.repository.cache_config, config.repository.response_cache_byte_size)
    limits_rates = config.repository.rate_limit != "off"
    beside = [unloaded_config(name) for entry in embedding_models(config) for name in entry.public_names]
    check = RepositoryCheck(settings, backends, has_cache=cache is not None, limits_rates=limits_rates, beside=beside)
    return check.verdicts(_repositories(config)[0])


def command_line_models(config: Config) -> list[LoadableModel]:
    """MODEL first, where the command names one or means the demo model, then each --embedding-model. Raises
    ConfigError."""
    models = config.models
    if config.has_model:
        return [LoadableModel(models, models.model.served_model_name), *embedding_models(config)]
    if models.adapters.lora or models.adapters.lora_directory:
        raise ConfigError("lora: there is no MODEL; a model in a repository has its adapters in its model.json")
    if models.cache.kv_events is not None:
        raise ConfigError("kv-events: there is no MODEL; a model in a repository has it in its model.json")
    return embedding_models(config)


def embedding_models(config: Config) -> list[LoadableModel]:
    """Of --embedding-model."""
    entries = []
    for text in config.embeddings.embedding_model:
        name, equals, place = text.partition("=")
        settings = settings_beside(config.models, "embedding", {"model": place if equals else text})
        entries.append(LoadableModel(settings, (name,) if equals else (), "pool"))
    return entries


def build_loaders(
    config: Config,
    settings: RepositorySettings,
    loader: ModelLoader,
    dataplane: DataPlane,
    budget: MemoryBudget,
    upstreams: LazyUpstreams,
) -> Loaders:
    """By the backend's name; `loader` loads the language models. Raises ConfigError."""
    limiter = build_rate_limiter(config.repository.rate_limit, config.repository.rate_limit_resource)
    counted = budget if config.repository.load_on_demand else None
    if settings.backend_options.get(UPSTREAM_BACKEND):
        raise ConfigError(f"backend-config: the backend {UPSTREAM_BACKEND} has no settings")
    classic = ClassicLoaders(settings.backend_options, limiter, counted)
    language = language_loaders(config.models, dataplane, loader.load, settings.backend_options)

    def backend_loader(backend: str, folder: Path | None = None) -> Loader:
        if backend == UPSTREAM_BACKEND:
            return upstreams.loader()
        return language.get(backend) or classic(backend, folder)

    return backend_loader


def _repositories(config: Config) -> tuple[list[Repository], tuple[str, ...]]:
    """Each place once, by whatever names it is given; and the folders that are not there, which end the start unless
    the operator says otherwise."""
    by_place: dict[object, Repository] = {}
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
            by_place.setdefault(_place(repository.url), repository)
    return list(by_place.values()), tuple(missing)


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
