"""All models of a server: of the command line, embedding models, those of repositories and of other servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import chain

from penstock.engines.client.engine import Engine
from penstock.engines.door.spec import DoorSpec
from penstock.engines.errors import AlreadyExistsError
from penstock.engines.host.failure_text import failures_of
from penstock.gateway.apis.pooling.kserve_model import VectorModel, is_offered
from penstock.gateway.configuration.config import Config, ConfigError
from penstock.gateway.metrics.custom import CustomMetrics
from penstock.gateway.metrics.machine import GpuMetrics
from penstock.gateway.metrics.prometheus_text import Family
from penstock.gateway.metrics.registry import Source
from penstock.gateway.metrics.triton import TritonMetrics, latency_observers, read_metrics_config
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.models.language.endpoint_metrics import EndpointMetrics
from penstock.gateway.models.language.kserve.language_model import LanguageModel
from penstock.gateway.models.language.models import LoadedModel
from penstock.gateway.models.loader import LoadableModel, Model, ModelLoader
from penstock.gateway.models.pooling.model import PoolingModel
from penstock.gateway.models.pooling.plane import PoolingPlane
from penstock.gateway.models.repository.manager import ModelRepository
from penstock.gateway.models.traffic.service import TrafficService
from penstock.gateway.requests.first_steps import Kind
from penstock.gateway.requests.intake import WorkPools
from penstock.gateway.requests.loading_board import LoadingBoard
from penstock.gateway.requests.server_health import is_live
from penstock.gateway.server.composition.models import (
    build_budget,
    build_dataplane,
    build_loader,
    build_loaders,
    build_on_demand,
    build_pooling,
    build_repository,
    build_upstreams,
    command_line_models,
    repository_settings,
)

logger = logging.getLogger("penstock")


class CommandLineModels:
    """A repository of its own kind: MODEL and each --embedding-model. What is in a folder is checked at once; what
    comes from the hub when it is here, after the ports are open."""

    def __init__(
        self, config: Config, loader: ModelLoader, dataplane: DataPlane, pooling: PoolingPlane, models: ModelRepository
    ) -> None:
        """`models`: what they are added to as KServe models. Raises ConfigError, AlreadyExistsError."""
        self._loader = loader
        self._dataplane = dataplane
        self._pooling = pooling
        self._repository = models
        self._models: dict[LoadableModel, Model | None] = {}
        """None: it is still on the hub."""
        for entry in command_line_models(config):
            with _names_of(entry):
                self._models[entry] = model = loader.prepare(entry)
            if isinstance(model, LoadedModel):
                self._add_language_model(model, entry)

    def _add_language_model(self, model: LoadedModel, entry: LoadableModel) -> None:
        """Known to KServe while it is loading."""
        for name in model.names:
            self._repository.add(LanguageModel(self._dataplane, model, name, policy=entry.settings.scheduling.policy))

    def _add_pooling_model(self, model: PoolingModel) -> None:
        """Its tensors are known when it is loaded."""
        for name in model.names if is_offered(model) else ():
            self._repository.add(VectorModel(self._pooling, model, name))

    async def start(self) -> None:
        """Raises ConfigError, PenstockError."""
        for entry, model in self._models.items():
            model = model or await self._fetch(entry)
            with failures_of(model.names[0]):
                await self._loader.start(model)
            if isinstance(model, PoolingModel):
                self._add_pooling_model(model)
            logger.info("ready: %s on %s", model.names[0], _description(model))

    async def _fetch(self, entry: LoadableModel) -> Model:
        model = await self._loader.fetch(entry)
        with _names_of(entry):
            self._loader.take_names(model)
        self._models[entry] = model
        if isinstance(model, LoadedModel):
            self._add_language_model(model, entry)
        return model

    @property
    def first(self) -> tuple[str, Kind] | None:
        """Name and kind of the first one that generates; None while there is none."""
        model = next((model for model in self._models.values() if isinstance(model, LoadedModel)), None)
        if model is None:
            return None
        return model.names[0], "completion" if model.chat_template is None else "chat"

    async def stop(self) -> None:
        for model in self._models.values():
            if model is not None:
                await model.stop()


@contextmanager
def _names_of(entry: LoadableModel) -> Iterator[None]:
    """Around what takes names. Raises ConfigError where those of an --embedding-model are taken already."""
    try:
        yield
    except AlreadyExistsError as error:
        if entry.task != "pool":
            raise
        raise ConfigError(f"embedding-model: {error.message}") from None


def _description(model: Model) -> str:
    """Of a model that has been loaded, for the log."""
    if isinstance(model, PoolingModel):
        pooled = model.source.info
        kind = "numbers for a text" if model.head is None else "labels"
        return f"{pooled.runner}; texts of up to {pooled.max_tokens} tokens, {pooled.output_size} {kind}"
    info = model.engine.info
    groups = len(info.kv_groups)
    blocks = f"KV cache {info.num_blocks} blocks of {info.block_size} tokens"
    shared = f", shared by {groups} groups of layers" if groups > 1 else ""
    states = f", a checkpoint of states every {info.states.interval} tokens" if info.states is not None else ""
    return f"{info.runner}; context {info.context_length} tokens, {blocks}{shared}{states}"


class ServedModels:
    """The models of a server from its start to its end, and what they share. `traffic` has the public names that
    several of them serve."""

    def __init__(
        self, config: Config, pools: WorkPools, board: LoadingBoard, new_door: Callable[[], DoorSpec] | None = None
    ) -> None:
        """`new_door`: see `ModelBuilder`. Raises ConfigError, AlreadyExistsError."""
        self._settings = config.server
        self._has_repository = bool(config.repository.model_repository)
        self.on_demand = build_on_demand(config)
        self.dataplane = build_dataplane(config, pools, board, self.on_demand)
        self.upstreams = build_upstreams(config, self.dataplane.models)
        self._custom, self._gpus = CustomMetrics(), GpuMetrics()
        latencies = read_metrics_config(config.server.metrics_config)
        self.budget = budget = build_budget(config, self._gpus, self.on_demand)
        self.pooling = build_pooling(config, self.dataplane.models, pools)
        loader = build_loader(config, self.dataplane.models, budget, board, new_door)
        settings = repository_settings(config.repository, config.server.crash_folder)
        self.repository = build_repository(
            config,
            settings,
            build_loaders(config, settings, loader, self.dataplane, budget, self.upstreams),
            self.dataplane.models,
            self._custom,
            board,
            latency_observers(latencies),
            self.on_demand,
        )
        self._triton = TritonMetrics(
            self.repository.models,
            self.repository.load_seconds,
            self.repository.cache_counters,
            latencies,
            machine=config.server.allow_cpu_metrics,
        )
        self._command_line = CommandLineModels(config, loader, self.dataplane, self.pooling, self.repository)
        self.traffic = TrafficService(
            config.traffic.traffic,
            self.repository,
            self.dataplane,
            self.on_demand,
        )
        self.repository.host.route(self.traffic.models, self.traffic.table.names.__contains__)

    async def start(self) -> None:
        """Loads those that are to be there from the beginning. Raises ConfigError, PenstockError."""
        await self._command_line.start()
        self.upstreams.start()
        await self.repository.start()
        check_default_model(self._settings.default_model, self.dataplane.models, has_repository=self._has_repository)

    async def stop(self, give_time: Callable[[asyncio.Task[None]], Awaitable[None]]) -> None:
        """`give_time` waits for the end of the repositories' models, as long as they may take: one that still executes
        what nobody waits for, or that hangs, must not keep the process from ending."""
        await self._command_line.stop()
        unloading = asyncio.create_task(self.repository.stop())
        await give_time(unloading)
        if not unloading.done():
            logger.warning("some models are still executing requests: they are stopped")
            unloading.cancel()
        await asyncio.gather(unloading, return_exceptions=True)
        self.upstreams.stop()

    async def drain(self) -> None:
        """Until nothing is in flight in the engines, from this server or another."""
        await asyncio.gather(*(model.drain() for model in self.dataplane.models.known()))

    def is_live(self) -> bool:
        """False where only another process would help: see `server_health.is_live`."""
        failed = [model.engine.failed for model in self.dataplane.models.known()]
        failed += [model.source.failed for model in self.dataplane.models.pooling_models()]
        any_ready = any(model.ready for model in self.repository.models())
        return is_live(failed, any_ready, strict=self._settings.strict_liveness)

    @property
    def ready(self) -> bool:
        """Those that have to be there answer."""
        return self.repository.ready and self.pooling.ready

    @property
    def engines(self) -> list[Engine]:
        """Of the language models that are loaded."""
        return [model.engine for _, model in self.dataplane.models.loaded()]

    @property
    def first_to_ask(self) -> tuple[str, Kind] | None:
        """Name and kind of the model that a person tries first; None: the server was started for none in particular."""
        pooling = (model for model in self.dataplane.models.pooling_models() if model.loaded)
        return self._command_line.first or next(((model.names[0], model.task) for model in pooling), None)

    def metrics(self) -> Iterator[Source]:
        """Of language, embedding and other servers' models, and of traffic rules."""
        yield from (model.metrics for model in self.dataplane.models.known())
        yield EndpointMetrics(self.dataplane.models.loaded, vllm_names=self._settings.vllm_metric_names)
        yield from self.pooling.metrics()
        yield self.traffic.metrics
        yield from self.upstreams.metrics()
        if self.on_demand is not None:
            yield self.on_demand.counts

    def triton_metrics(self) -> Iterator[Family]:
        """Those with Triton's names, and those that models have made themselves."""
        gpus = self._gpus.families() if self._settings.allow_gpu_metrics else ()
        return chain(self._triton.families(), gpus, self._custom.families())


def check_default_model(name: str | None, models: Catalogue, *, has_repository: bool) -> None:
    """Raises ConfigError for one that there is not, unless a repository may still get it."""
    if name is not None and not has_repository and name not in models:
        raise ConfigError(f"default-model: there is no model `{name}`")
