"""All models of a server: of the command line, embedding models, those of repositories and of other servers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from itertools import chain

from penstock.engines.client.engine import Engine
from penstock.engines.door.spec import DoorSpec
from penstock.gateway.command_line_model import CommandLineModel
from penstock.gateway.composition.models import (
    build_budget,
    build_dataplane,
    build_on_demand,
    build_other_servers,
    build_pooling,
    build_repository,
)
from penstock.gateway.configuration.config import Config, ConfigError
from penstock.gateway.embedding_models import EmbeddingModels
from penstock.gateway.front.first_steps import Kind
from penstock.gateway.front.loading_board import LoadingBoard
from penstock.gateway.front.server_health import is_live
from penstock.gateway.front.work_pool import WorkPools
from penstock.gateway.llm.endpoint_metrics import EndpointMetrics
from penstock.gateway.llm.language_models import LanguageModels
from penstock.gateway.metrics.custom import CustomMetrics
from penstock.gateway.metrics.machine import GpuMetrics
from penstock.gateway.metrics.prometheus_text import Family
from penstock.gateway.metrics.registry import Source
from penstock.gateway.metrics.triton import TritonMetrics, latency_observers, read_metrics_config
from penstock.gateway.traffic.service import TrafficService

logger = logging.getLogger("penstock")


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
        budget = build_budget(config, self._gpus)
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
