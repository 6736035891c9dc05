"""The life of a server process: start, serve, drain, stop.

The ports answer from the first moment: liveness is 200, readiness 503 until the model is loaded. SIGTERM and SIGINT
drain: readiness turns 503; for `drain_delay` new work is still served, since balancers need a moment to notice; then it
is refused with 503 and Retry-After, what runs may end within `drain_timeout`, and what is left then ends with an error
event. A second signal does not wait.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp

from penstock.engines.client.engine import Engine
from penstock.engines.errors import PenstockError
from penstock.gateway.batches.run_batch import BatchFile
from penstock.gateway.command_line_model import CommandLineModel
from penstock.gateway.composition import (
    NO_TRAFFIC_RULES,
    app_settings,
    build_access_log,
    build_batches,
    build_budget,
    build_dataplane,
    build_journal,
    build_keys,
    build_kserve,
    build_ledger,
    build_load_reports,
    build_on_demand,
    build_other_servers,
    build_pooling,
    build_repository,
    build_responses,
    build_restrictions,
    build_spans,
    connection_limits,
    granted_keys,
    grpc_settings,
    metrics_settings,
    open_database,
    tls_settings,
)
from penstock.gateway.configuration.config import Config, ConfigError, overlay
from penstock.gateway.embedding_models import EmbeddingModels
from penstock.gateway.front.drain import DrainState
from penstock.gateway.front.exposure import check_exposure
from penstock.gateway.front.first_steps import Kind, first_steps, reachable_host
from penstock.gateway.front.heap import settle
from penstock.gateway.front.loading_board import LoadingBoard
from penstock.gateway.front.loops import loop_factory
from penstock.gateway.front.server_health import ServerHealth, is_live
from penstock.gateway.front.server_log import log_handler, set_up_log
from penstock.gateway.front.service_manager import ServiceManager
from penstock.gateway.front.work_pool import WorkPools
from penstock.gateway.http.server import HttpServer, ServerSettings
from penstock.gateway.kserve.grpc.health import Health
from penstock.gateway.kserve.grpc.rpc import Guard
from penstock.gateway.kserve.grpc.server import GrpcServer
from penstock.gateway.kserve.grpc.service import Service, build_service
from penstock.gateway.llm.endpoint_metrics import EndpointMetrics
from penstock.gateway.metrics.custom import CustomMetrics
from penstock.gateway.metrics.gpu import GpuMetrics
from penstock.gateway.metrics.http_port import HttpPortMetrics
from penstock.gateway.metrics.intake import IntakeMetrics
from penstock.gateway.metrics.latencies import latency_observers
from penstock.gateway.metrics.metrics_config import read_metrics_config
from penstock.gateway.metrics.registry import Metrics
from penstock.gateway.metrics.requests import RequestMetrics
from penstock.gateway.metrics.server_load import EndedRequests
from penstock.gateway.metrics.triton import TritonMetrics
from penstock.gateway.open_ports import OpenPorts
from penstock.gateway.ports.http_apps import batch_endpoints, build_app, build_metrics_app
from penstock.gateway.ports.requests_in_flight import Chosen
from penstock.gateway.ports.scheduler_state import operator_routes
from penstock.gateway.signals import ServerSignals
from penstock.gateway.traffic.service import TrafficService

if TYPE_CHECKING:  # loaded for those who ask for several fronts
    from penstock.gateway.front_ports import FrontFolder, FrontPorts

logger = logging.getLogger("penstock")

_INTERRUPTED = 130
_UNLOAD_SECONDS = 5.0
"""That models get to unload at least, when requests have used up the drain timeout."""
_STOP_SECONDS = 30.0
"""That the rest of the end may take behind the drain: connections that close, models, what engines write to disk."""


def answer_file(config: Config, source: Path, target: Path) -> int:
    """Answers the requests in a file into another one, and ends; returns the exit status."""
    try:
        config = overlay(
            config,
            {f"allow_{port}": False for port in ("http", "grpc", "metrics")} | {"access_log": "off", "fronts": 1},
        )
    except ConfigError as error:
        logger.error("%s", error)
        return 1
    return serve(config, BatchFile(source, target, config.data.batch_lines_in_flight))


def serve(config: Config, file: BatchFile | None = None) -> int:
    """Runs a server until it is told to stop, or has answered the file; returns the exit status."""
    handler, view = log_handler()
    set_up_log(config.server.logging_level, handler)
    manager = ServiceManager.from_environment()
    board = LoadingBoard(manager.watching(view))
    try:
        check_exposure(config)
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(Server(config, board, manager).run(file))
    except (ConfigError, PenstockError) as error:
        logger.error("%s", error)
        return 1
    except KeyboardInterrupt:  # before the server handles signals
        return 130


def _new_front_folder(config: Config) -> FrontFolder | None:
    """None: there is one front, in this process. Raises ConfigError."""
    if config.server.fronts == 1:
        return None
    from penstock.gateway.front_ports import FrontFolder, front_count  # only for those who ask for several

    count = front_count(config)
    return FrontFolder(count) if count > 1 else None


def _with_model(config: Config) -> bool:
    """Whether the command names one, or means the demo model. Raises ConfigError."""
    others = config.repository.model_repository or config.embeddings.embedding_model or config.upstream.upstream
    wanted = config.model.model is not None or not others
    if not wanted and (config.adapters.lora or config.adapters.lora_directory):
        raise ConfigError("lora: there is no MODEL; a model in a repository has its adapters in its model.json")
    if not wanted and config.cache.kv_events is not None:
        raise ConfigError("kv-events: there is no MODEL; a model in a repository has it in its model.json")
    return wanted


class Server:
    """Everything that lives as long as the process. `run` is its life in a process of its own; `start` and `stop` are
    for a program that has an event loop and signals already."""

    def __init__(self, config: Config, board: LoadingBoard, manager: ServiceManager | None = None) -> None:
        """`manager` is told how far the server is. Raises ConfigError."""
        manager = manager or ServiceManager()
        self._config = config
        self._manager = manager
        server = config.server
        pools = WorkPools()
        on_demand = build_on_demand(config)
        self._folder = _new_front_folder(config)
        new_door = None if self._folder is None else self._folder.doors.new
        self._dataplane = build_dataplane(config, pools, board, on_demand)
        custom = CustomMetrics()
        gpus = GpuMetrics()
        budget = build_budget(config, gpus)
        latencies = read_metrics_config(server.metrics_config)
        observe = latency_observers(latencies)
        self._other_servers = build_other_servers(config, self._dataplane)
        self._models = build_repository(
            config, self._dataplane, custom, budget, board, self._other_servers, observe, on_demand, new_door
        )
        self._pooling = build_pooling(config, self._dataplane, pools)
        self._embeddings = EmbeddingModels(config, self._pooling, self._models, budget, board)
        self._model: CommandLineModel | None = None
        if _with_model(config):
            self._model = CommandLineModel(
                config, self._dataplane, self._models, budget, board, self._embeddings, new_door
            )
        refusal = None if on_demand is None else NO_TRAFFIC_RULES
        self._traffic = TrafficService(
            config.traffic.traffic, self._models, self._dataplane, self._pooling, refusal=refusal
        )
        self._models.host.route(self._traffic.models, self._traffic.table.names.__contains__)
        health = ServerHealth(self._is_live, self._would_serve, board.texts)
        self._kserve = build_kserve(config, self._traffic.models, self._dataplane, pools, health, on_demand)
        repository = self._models
        if self._folder is not None:
            self._kserve = replace(self._kserve, spread=self._spread)
        triton = TritonMetrics(repository.models, repository.load_seconds, repository.cache_counters, latencies)
        requests = RequestMetrics()
        metrics = Metrics(
            lambda: (
                *self._dataplane.metrics(),
                EndpointMetrics(self._dataplane.loaded_models, vllm_names=server.vllm_metric_names),
                *self._pooling.metrics(),
                self._traffic.metrics,
                *self._other_servers.metrics(),
                requests,
                IntakeMetrics(self._intake, pools),
                HttpPortMetrics(self._http.connections_by_version),
                *(() if self._batches is None else (self._batches,)),
                *(() if on_demand is None else (on_demand.counts,)),
            ),
            lambda: chain(triton.families(), gpus.families(), custom.families()),
        )
        self._database = open_database(config)
        self._ledger = build_ledger(config, self._database)
        self._access_log = build_access_log(config)
        self._spans = build_spans(config)
        ended = EndedRequests()
        self._load_reports = build_load_reports(config, self._dataplane, ended)
        journal = build_journal(self._access_log, self._spans, requests, ended, self._ledger)
        requests.in_flight = journal.in_flight
        self._keys = build_keys(config, self._ledger)
        settings = app_settings(config, self._keys, metrics, journal, health, self._load_reports, self._other_servers)
        self._journal = journal
        self._drain = settings.drain
        self._intake = settings.intake
        limits = connection_limits(config)
        self._endpoints = batch_endpoints(self._dataplane, settings, self._pooling)
        self._batches = build_batches(config, self._database, self._endpoints, settings)
        self._responses = build_responses(config, self._database, settings)
        self._settings = settings
        self.app = build_app(
            self._dataplane,
            settings,
            self._kserve,
            self._pooling,
            self._batches,
            self._responses,
            self._traffic.table,
            self._ledger,
        )
        """What the HTTP port answers."""
        self._http = HttpServer(
            self.app,
            ServerSettings(
                host=server.address("http"),
                port=server.http_port,
                tls=tls_settings(config, "http"),
                limits=replace(limits, send_timeout=server.send_timeout),
                intake=self._intake,
                http2=server.allow_http2,
            ),
        )
        others = None if self._folder is None else self._requests_in_fronts
        operator = HttpServer(
            build_metrics_app(
                self._dataplane, metrics_settings(config, settings), operator_routes(self._dataplane, journal, others)
            ),
            ServerSettings(host=server.address("metrics"), port=server.metrics_port, limits=limits, http2=False),
        )
        self._signals = ServerSignals(manager)
        if self._folder is None:
            self._ports: OpenPorts | FrontPorts = OpenPorts(
                config, self._http, operator, self._new_grpc_server, self._signals
            )
        else:
            self._ports = self._front_ports(self._folder, self.app, operator)
            metrics.elsewhere = self._ports.fronts
        self._loaded = False

    def _new_grpc_server(self) -> GrpcServer:
        return GrpcServer(
            grpc_settings(self._config),
            self._kserve,
            self._would_serve,
            self._drain,
            self._keys,
            self._journal,
            build_restrictions(self._config)[1],
            self._intake,
            self._load_reports,
        )

    def _front_ports(self, folder: FrontFolder, app: ASGIApp, operator: HttpServer) -> FrontPorts:
        from penstock.gateway.front_ports import FrontPorts, Shared

        shared = Shared(
            app=app,
            kserve=self._kserve,
            restrictions=build_restrictions(self._config)[1],
            would_serve=self._would_serve,
            settings=self._settings,
            dataplane=self._dataplane,
            models=self._models,
            traffic=self._traffic.table,
            signals=self._signals,
            ledger=self._ledger,
        )
        return FrontPorts(self._config, folder, shared, operator)

    async def _spread(self) -> None:
        if not isinstance(self._ports, OpenPorts):
            await self._ports.spread()

    async def _requests_in_fronts(self, limit: int, tenant: str | None, model: str | None) -> Sequence[Chosen]:
        return (
            [] if isinstance(self._ports, OpenPorts) else await self._ports.fronts.list_requests(limit, tenant, model)
        )

    def _would_serve(self) -> bool:
        return self._loaded and self._models.ready and self._pooling.ready and not self._drain.leaving

    def _is_live(self) -> bool:
        failed = [model.engine.failed for model in self._dataplane.known_models()]
        failed += [model.source.failed for model in self._pooling.known_models()]
        others_ready = any(model.ready for model in self._models.models())
        return is_live(failed, others_ready, strict=self._config.server.strict_liveness)

    @property
    def engines(self) -> list[Engine]:
        """Of the language models that are loaded."""
        return [model.engine for _, model in self._dataplane.loaded_models()]

    @property
    def live(self) -> bool:
        return self._is_live()

    @property
    def ready(self) -> bool:
        """The models are loaded, and it does not drain."""
        return self._would_serve()

    @property
    def drain(self) -> DrainState:
        return self._drain

    def grpc_service(self) -> Service:
        """What the gRPC port answers, for another transport. Raises ConfigError."""
        restrictions = build_restrictions(self._config)[1]
        guard = Guard(self._keys, self._drain, self._journal, restrictions, self._intake, self._load_reports)
        return build_service(self._kserve, guard, Health(self._would_serve), grpc_settings(self._config))

    async def start(self) -> None:
        """Opens the ports that are allowed, and loads the models. Raises ConfigError, PenstockError; `stop` frees what
        was there."""
        self._begin()
        await self._ports.open()
        await self._load(None)

    async def stop(self) -> None:
        """Drains, and frees everything."""
        await self._shut_down()

    def _begin(self) -> None:
        self._intake.lag.start()
        self._responses.start()

    async def run(self, file: BatchFile | None = None) -> int:
        """Until a signal comes, or the file is answered. Returns the exit status."""
        self._signals.handle()
        if self._config.server.api_key_file:
            self._signals.on_hangup(self._read_keys_again)
        self._begin()
        self._manager.start_watchdog(self._is_live)
        if file is not None:
            file.check(self._endpoints, self._settings)
        await self._ports.open()
        loading = asyncio.create_task(self._load(file))
        stopping = asyncio.create_task(self._signals.end.wait())
        status = 0
        try:
            await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                if file is None:
                    await stopping
            else:
                loading.cancel()
                if self._loaded:  # it answers a file; models that are loading are told to stop below
                    await asyncio.gather(loading, return_exceptions=True)
                status = 0 if file is None else _INTERRUPTED
        except (PenstockError, ConfigError) as error:
            logger.error("%s%s", "" if self._loaded else "the models could not be loaded: ", error)
            status = 1
        if self._loaded and file is None and not status:
            await self._leave()
        await self._shut_down()
        return 1 if self._signals.failed else status

    async def _load(self, file: BatchFile | None) -> None:
        """Answers the file, too, where there is one."""
        if self._model is not None:
            await self._model.start()
        await self._embeddings.start()
        self._other_servers.start()
        await self._models.start()
        self._loaded = True
        if self._batches is not None:
            await self._batches.start()
        if file is not None:
            await file.answer(self._endpoints, self._settings, self._is_live)
            return
        settle()
        self._manager.ready("ready")
        if self._config.repository.model_repository:
            served = [f"{model.name} {model.version}" for model in self._models.models() if model.ready]
            logger.info("ready: %d models: %s", len(served), ", ".join(served) or "none is loaded yet")
        if sys.stderr.isatty():
            self._show_first_steps()

    def _show_first_steps(self) -> None:
        """For a person who has just started a server and looks at its log."""
        server = self._config.server
        if not server.allow_http:
            return
        url = self._ports.http_url(reachable_host(server.address("http")))
        known: list[tuple[str, Kind]] = [(name, model.task) for name, model in self._pooling.loaded_names()]
        if self._model is not None and self._model.name_and_kind is not None:
            known.insert(0, self._model.name_and_kind)
        if known:
            logger.info("%s", first_steps(url, *known[0], needs_key=self._keys.needed))

    def _read_keys_again(self) -> None:
        try:
            granted = granted_keys(self._config, self._ledger)
        except ConfigError as error:
            logger.error("the keys stay as they are: %s", error)
            return
        self._keys.replace(granted)
        logger.info("read the key file again: %d keys", len(granted))

    async def _leave(self) -> None:
        """Balancers get time to send new work elsewhere, before any is refused."""
        self._drain.leave()
        await self._ports.drain()
        delay = self._config.server.drain_delay
        if delay:
            self._tell_manager_of_end("serving until balancers have noticed", delay)
            logger.info("not ready any more; new requests are served for another %g s", delay)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._signals.hurry.wait(), delay)

    def _tell_manager_of_end(self, status: str, delay: float = 0.0) -> None:
        self._manager.stopping(status, delay + self._config.server.drain_timeout + _STOP_SECONDS)

    async def _shut_down(self) -> None:
        ends = asyncio.get_running_loop().time() + self._config.server.drain_timeout
        self._drain.begin()
        self._tell_manager_of_end(f"draining {self._drain.in_flight} requests")
        self._traffic.table.stop_shadows()
        if self._batches is not None:
            await self._batches.stop()
        await self._ports.drain()
        if self._drain.in_flight:
            logger.info("draining %d requests", self._drain.in_flight)
        await self._wait_until_idle()
        self._drain.expire()
        await self._responses.stop()
        await self._ports.stop()
        self._ledger.write()
        self._database.close()
        if self._model is not None:
            await self._model.stop()
        await self._embeddings.stop()
        await self._stop_models(ends)
        self._other_servers.stop()
        self._intake.lag.stop()
        self._kserve.tracing.close()
        if self._access_log is not None:
            self._access_log.flush()
        if self._spans is not None:
            self._spans.close()
        self._manager.close()
        logger.info("stopped")

    async def _wait_until_idle(self) -> None:
        idle = asyncio.create_task(self._idle())
        await self._wait_in_hurry(idle, self._config.server.drain_timeout)
        idle.cancel()

    async def _idle(self) -> None:
        """Nothing is in flight, here or in other servers that use this one's engines."""
        if self._folder is not None:  # fronts are such servers, too: what they have let in still comes to the engines
            await self._drain.wait_idle()
        await asyncio.gather(self._drain.wait_idle(), *(model.drain() for model in self._dataplane.known_models()))

    async def _stop_models(self, ends: float) -> None:
        """A model that still executes what nobody waits for, or that hangs, must not keep the process from ending."""
        stopping = asyncio.create_task(self._models.stop())
        await self._wait_in_hurry(stopping, max(_UNLOAD_SECONDS, ends - asyncio.get_running_loop().time()))
        if not stopping.done():
            logger.warning("some models have not ended what they execute: they are stopped")
            stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)

    async def _wait_in_hurry(self, task: asyncio.Task[Any], seconds: float | None = None) -> None:
        """Until the task is done, the time is over, or a second signal has come."""
        hurry = asyncio.create_task(self._signals.hurry.wait())
        await asyncio.wait((task, hurry), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
