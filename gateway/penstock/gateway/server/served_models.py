"""All models of a server: of the command line, embedding models, those of repositories and of other servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from itertools import chain

import msgspec

from penstock.engines.client.engine import Engine
from penstock.engines.door.spec import DoorSpec
from penstock.engines.encoder.model_folder import makes_vectors
from penstock.engines.errors import AlreadyExistsError
from penstock.engines.host.failure_text import failures_of
from penstock.gateway.apis.pooling.builder import build_pooling_model
from penstock.gateway.apis.pooling.kserve_model import VectorModel, is_offered
from penstock.gateway.apis.pooling.models import PoolingModel
from penstock.gateway.apis.pooling.plane import PoolingPlane
from penstock.gateway.configuration.config import Config, ConfigError, overlay
from penstock.gateway.configuration.sections.language_model import OF_OUR_SCHEDULER, DoorConfig, ReplicaConfig
from penstock.gateway.metrics.custom import CustomMetrics
from penstock.gateway.metrics.machine import GpuMetrics
from penstock.gateway.metrics.prometheus_text import Family
from penstock.gateway.metrics.registry import Source
from penstock.gateway.metrics.triton import TritonMetrics, latency_observers, read_metrics_config
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.models.language.endpoint_metrics import EndpointMetrics
from penstock.gateway.models.language.hub import check_revision, fetch_draft_model, fetch_model
from penstock.gateway.models.language.kserve.language_model import LanguageModel
from penstock.gateway.models.language.language_models import LanguageModels
from penstock.gateway.models.language.model_builder import build_model, public_names
from penstock.gateway.models.language.models import LoadedModel, ModelSource, find_model, is_hub_id
from penstock.gateway.models.memory.budget import MemoryBudget
from penstock.gateway.models.repository.manager import ModelRepository
from penstock.gateway.models.traffic.service import TrafficService
from penstock.gateway.requests.first_steps import Kind
from penstock.gateway.requests.intake import WorkPools
from penstock.gateway.requests.loading_board import LoadingBoard
from penstock.gateway.requests.server_health import is_live
from penstock.gateway.server.composition.models import (
    build_budget,
    build_dataplane,
    build_on_demand,
    build_other_servers,
    build_pooling,
    build_repository,
)

logger = logging.getLogger("penstock")

_OF_MODEL = (
    "engine",
    "device",
    "max_model_len",
    "weights",
    "activations",
    "threads",
    "cpus",
    "numa_nodes",
    "chat_template",
    "revision",
    "speculative_model",
)
"""Settings of MODEL, which those beside it do not share."""


class EmbeddingModels:
    """What is in a folder is checked at once; what comes from the hub when it is here, after the ports are open."""

    def __init__(
        self, config: Config, plane: PoolingPlane, models: ModelRepository, budget: MemoryBudget, board: LoadingBoard
    ) -> None:
        """`models`: what they are added to as KServe models. Raises ConfigError."""
        self._plane = plane
        self._models = models
        self._budget = budget
        self._board = board
        self._to_fetch: dict[str, str] = {}
        """Hub ids by name."""
        defaults = {name: getattr(type(config.model)(), name) for name in _OF_MODEL}
        no_guesses = {name: OF_OUR_SCHEDULER[name] for name in ("speculative", "max_draft_tokens")}
        alone = msgspec.to_builtins(ReplicaConfig()) | msgspec.to_builtins(DoorConfig())
        self._beside = overlay(config, defaults | no_guesses | alone | {"lora": (), "lora_directory": None})
        for text in config.embeddings.embedding_model:
            name, equals, place = text.partition("=")
            place = place if equals else text
            if is_hub_id(place):
                self._to_fetch[name] = place
                board.announce((name,))
            else:
                source = find_model(place)
                self.add(self._build(source, name if equals else source.name))

    def _build(self, source: ModelSource, name: str) -> PoolingModel:
        return build_pooling_model(self._beside, source, (name,), self._budget, self._board)

    def add(self, model: PoolingModel) -> None:
        """It is loaded with the others. Raises ConfigError."""
        try:
            self._plane.add(model)
        except AlreadyExistsError as error:
            raise ConfigError(f"embedding-model: {error.message}") from None

    async def start(self) -> None:
        """Raises ConfigError, PenstockError."""
        for name, hub_id in self._to_fetch.items():
            report = self._board.reporter((name,))
            try:
                source = await fetch_model(hub_id, report)
                self.add(await asyncio.to_thread(self._build, source, name))
            finally:
                report(None)
        for model in self._plane.known_models():
            report = self._board.reporter(model.names)
            try:
                with failures_of(model.names[0]):
                    await model.source.start()
            finally:
                report(None)
            model.loaded = True
            if is_offered(model):
                for name in model.names:
                    self._models.add(VectorModel(self._plane, model, name))
            info = model.source.info
            kind = f"{info.output_size} numbers for a text" if model.head is None else f"{info.output_size} labels"
            logger.info(
                "ready: %s on %s; texts of up to %d tokens, %s", model.names[0], info.runner, info.max_tokens, kind
            )

    async def stop(self) -> None:
        for model in self._plane.known_models():
            await model.source.stop()


class CommandLineModel:
    """What is in a folder is checked at once; what comes from the hub when it is here, after the ports are open."""

    def __init__(
        self,
        config: Config,
        dataplane: DataPlane,
        models: ModelRepository,
        budget: MemoryBudget,
        board: LoadingBoard,
        embeddings: EmbeddingModels,
        new_door: Callable[[], DoorSpec] | None = None,
    ) -> None:
        """`new_door`: as for `build_model`. Raises ConfigError."""
        self._config = config
        self._dataplane = dataplane
        self._models = models
        self._budget = budget
        self._board = board
        self._embeddings = embeddings
        self._new_door = new_door
        self._names = public_names(config, config.model.model or "")
        self._model: LoadedModel | None = None
        check_revision(config.model.model, config.model.revision)
        if is_hub_id(config.model.model) or is_hub_id(config.model.speculative_model):
            board.announce(self._names)
        else:
            self._add(self._build(find_model(config.model.model)))

    def _build(self, source: ModelSource) -> LoadedModel | PoolingModel:
        if makes_vectors(source.folder):
            return build_pooling_model(self._config, source, self._names, self._budget, self._board)
        return build_model(self._config, source, budget=self._budget, board=self._board, new_door=self._new_door)

    def _add(self, model: LoadedModel | PoolingModel) -> None:
        if isinstance(model, PoolingModel):
            self._embeddings.add(model)
            return
        self._dataplane.models.add(model)
        for name in model.names:
            self._models.add(LanguageModel(self._dataplane, model, name, policy=self._config.scheduling.policy))
        self._model = model

    async def start(self) -> None:
        """An embedding model is started with the others of its kind. Raises ConfigError, PenstockError."""
        if self._names[0] in self._board:
            report = self._board.reporter(self._names)
            try:
                source = await fetch_model(self._config.model.model, report, self._config.model.revision)
                self._config = await fetch_draft_model(self._config, report)
                self._add(await asyncio.to_thread(self._build, source))
            finally:
                report(None)
        if self._model is None:
            return
        with failures_of(self._model.names[0]):
            await self._model.start()
        self._dataplane.models.serve(self._model)
        info = self._model.engine.info
        num_groups = len(info.kv_groups)
        logger.info(
            "ready: %s on %s; context %d tokens, KV cache %d blocks of %d tokens%s",
            self._model.names[0],
            info.runner,
            info.context_length,
            info.num_blocks,
            info.block_size,
            f", shared by {num_groups} groups of layers" if num_groups > 1 else "",
        )

    @property
    def name_and_kind(self) -> tuple[str, Kind] | None:
        """Of the loaded model; None while there is none, and for one that gives embeddings or scores."""
        if self._model is None:
            return None
        return self._model.names[0], "completion" if self._model.chat_template is None else "chat"

    async def stop(self) -> None:
        if self._model is not None:
            await self._model.stop()


class ServedModels:
    """The models of a server from its start to its end, and what they share. `traffic` has the public names that
    several of them serve."""

    def __init__(
        self, config: Config, pools: WorkPools, board: LoadingBoard, new_door: Callable[[], DoorSpec] | None = None
    ) -> None:
        """`new_door`: as for `build_model`. Raises ConfigError."""
        self._settings = config.server
        self._has_repository = bool(config.repository.model_repository)
        self.on_demand = build_on_demand(config)
        self.dataplane = build_dataplane(config, pools, board, self.on_demand)
        self.other_servers = build_other_servers(config, self.dataplane)
        self._custom, self._gpus = CustomMetrics(), GpuMetrics()
        latencies = read_metrics_config(config.server.metrics_config)
        self.budget = budget = build_budget(config, self._gpus)
        self.repository = build_repository(
            config,
            self.dataplane,
            self._custom,
            budget,
            board,
            self.other_servers,
            latency_observers(latencies),
            self.on_demand,
            new_door,
        )
        self._triton = TritonMetrics(
            self.repository.models,
            self.repository.load_seconds,
            self.repository.cache_counters,
            latencies,
            machine=config.server.allow_cpu_metrics,
        )
        self.pooling = build_pooling(config, self.dataplane, pools)
        self._embeddings = EmbeddingModels(config, self.pooling, self.repository, budget, board)
        self._command_line_model: CommandLineModel | None = None
        if _has_command_line_model(config):
            self._command_line_model = CommandLineModel(
                config, self.dataplane, self.repository, budget, board, self._embeddings, new_door
            )
        self.traffic = TrafficService(
            config.traffic.traffic,
            self.repository,
            self.dataplane,
            self.pooling,
            self.other_servers.models,
            self.on_demand,
        )
        self.repository.host.route(self.traffic.models, self.traffic.table.names.__contains__)

    async def start(self) -> None:
        """Loads those that are to be there from the beginning. Raises ConfigError, PenstockError."""
        if self._command_line_model is not None:
            await self._command_line_model.start()
        await self._embeddings.start()
        self.other_servers.start()
        await self.repository.start()
        check_default_model(self._settings.default_model, self.dataplane.models, has_repository=self._has_repository)

    async def stop(self, give_time: Callable[[asyncio.Task[None]], Awaitable[None]]) -> None:
        """`give_time` waits for the end of the repositories' models, as long as they may take: one that still executes
        what nobody waits for, or that hangs, must not keep the process from ending."""
        if self._command_line_model is not None:
            await self._command_line_model.stop()
        await self._embeddings.stop()
        unloading = asyncio.create_task(self.repository.stop())
        await give_time(unloading)
        if not unloading.done():
            logger.warning("some models are still executing requests: they are stopped")
            unloading.cancel()
        await asyncio.gather(unloading, return_exceptions=True)
        self.other_servers.stop()

    async def drain(self) -> None:
        """Until nothing is in flight in the engines, from this server or another."""
        await asyncio.gather(*(model.drain() for model in self.dataplane.models.known()))

    def is_live(self) -> bool:
        """False where only another process would help: see `server_health.is_live`."""
        failed = [model.engine.failed for model in self.dataplane.models.known()]
        failed += [model.source.failed for model in self.pooling.known_models()]
        others_ready = any(model.ready for model in self.repository.models())
        return is_live(failed, others_ready, strict=self._settings.strict_liveness)

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
        if self._command_line_model is not None and self._command_line_model.name_and_kind is not None:
            return self._command_line_model.name_and_kind
        return next(((name, model.task) for name, model in self.pooling.loaded_names()), None)

    def metrics(self) -> Iterator[Source]:
        """Of language, embedding and other servers' models, and of traffic rules."""
        yield from (model.metrics for model in self.dataplane.models.known())
        yield EndpointMetrics(self.dataplane.models.loaded, vllm_names=self._settings.vllm_metric_names)
        yield from self.pooling.metrics()
        yield self.traffic.metrics
        yield from self.other_servers.metrics()
        if self.on_demand is not None:
            yield self.on_demand.counts

    def triton_metrics(self) -> Iterator[Family]:
        """Those with Triton's names, and those that models have made themselves."""
        gpus = self._gpus.families() if self._settings.allow_gpu_metrics else ()
        return chain(self._triton.families(), gpus, self._custom.families())


def check_default_model(name: str | None, models: LanguageModels, *, has_repository: bool) -> None:
    """Raises ConfigError for one that there is not, unless a repository may still get it."""
    if name is None or has_repository or models.knows(name):
        return
    if not models.is_reserved(name):  # those of embeddings and of other servers are
        raise ConfigError(f"default-model: there is no model `{name}`")


def _has_command_line_model(config: Config) -> bool:
    """Whether the command names a model, or means the demo model. Raises ConfigError."""
    others = config.repository.model_repository or config.embeddings.embedding_model or config.upstream.upstream
    wanted = config.model.model is not None or not others
    if not wanted and (config.adapters.lora or config.adapters.lora_directory):
        raise ConfigError("lora: there is no MODEL; a model in a repository has its adapters in its model.json")
    if not wanted and config.cache.kv_events is not None:
        raise ConfigError("kv-events: there is no MODEL; a model in a repository has it in its model.json")
    return wanted
