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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.engines.client.engine import Engine
from penstock.engines.errors import PenstockError
from penstock.engines.host.failure_text import as_load_error
from penstock.engines.process.worker_process import end_unused
from penstock.gateway.apis.batches.run_batch import BatchFile
from penstock.gateway.apis.kserve.grpc.health import HealthService
from penstock.gateway.apis.kserve.grpc.rpc import RpcGuard
from penstock.gateway.apis.kserve.grpc.server import GrpcServer
from penstock.gateway.apis.kserve.grpc.service import Service, build_service
from penstock.gateway.apis.openai.tensor_models import TensorModels
from penstock.gateway.apis.operator_views import operator_routes
from penstock.gateway.configuration.command_parser import as_flags
from penstock.gateway.configuration.config import SETTINGS, Config, ConfigError, overlay
from penstock.gateway.metrics.registry import Metrics, Source
from penstock.gateway.metrics.request_metrics import HttpPortMetrics, IntakeMetrics
from penstock.gateway.requests.call import DrainState
from penstock.gateway.requests.exposure import check_exposure, shows_console
from penstock.gateway.requests.first_steps import first_steps, reachable_host
from penstock.gateway.requests.heap import settle
from penstock.gateway.requests.intake import WorkPools
from penstock.gateway.requests.loading_board import LoadingBoard
from penstock.gateway.requests.loops import loop_factory
from penstock.gateway.requests.request_watch import RequestChoice, RequestWatch, ServerRequests, WatchedRequests
from penstock.gateway.requests.server_health import ServerHealth
from penstock.gateway.requests.server_log import log_handler, set_up_log
from penstock.gateway.requests.service_manager import ServiceManager
from penstock.gateway.server.composition.ports import (
    app_settings,
    build_keys,
    build_kserve,
    build_restrictions,
    connection_limits,
    granted_keys,
    grpc_settings,
    http_settings,
    metrics_settings,
)
from penstock.gateway.server.composition.records import (
    RequestRecords,
    build_batches,
    build_ledger,
    build_responses,
    open_database,
)
from penstock.gateway.server.open_ports import OpenPorts
from penstock.gateway.server.ports.http_apps import batch_endpoints, build_app, build_metrics_app
from penstock.gateway.server.served_models import ServedModels
from penstock.gateway.server.signals import ServerSignals
from penstock.gateway.transports.http.routes import Route
from penstock.gateway.transports.http.server import HttpServer, ServerSettings

if TYPE_CHECKING:  # loaded for those who ask for several fronts
    from penstock.gateway.server.front_ports import FrontFolder, FrontPorts

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
        logger.error("%s", as_flags(str(error), SETTINGS))
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
            return runner.run(_new_server(config, board, manager).run(file))
    except (ConfigError, PenstockError) as error:
        logger.error("%s", as_flags(str(error), SETTINGS))
        return 1


def _new_server(config: Config, board: LoadingBoard, manager: ServiceManager) -> Server:
    """Raises ConfigError, PenstockError."""
    try:
        return Server(config, board, manager)
    except (ConfigError, PenstockError):
        raise
    except Exception as error:  # of a library that reads the models' files
        raise as_load_error(error) from error


def _new_front_folder(config: Config) -> FrontFolder | None:
    """None: there is one front, in this process. Raises ConfigError."""
    if config.server.fronts == 1:
        return None
    from penstock.gateway.server.front_ports import FrontFolder, front_count

    count = front_count(config)
    return FrontFolder(count) if count > 1 else None


class Server:
    """Everything that lives as long as the process. `run` is its life in a process of its own; `start` and `stop` are
    for a program that has an event loop and signals already."""

    def __init__(self, config: Config, board: LoadingBoard, manager: ServiceManager | None = None) -> None:
        """`manager` is told how far the server is. Raises ConfigError."""
        self._config = config
        self._manager = manager or ServiceManager()
        self._signals = ServerSignals(self._manager)
        self._loaded = False
        self._folder = _new_front_folder(config)
        self._pools = WorkPools()
        new_door = None if self._folder is None else self._folder.doors.new
        self._models = models = ServedModels(config, self._pools, board, new_door)
        health = ServerHealth(models.is_live, self._would_serve, board.texts)
        self._kserve = build_kserve(config, models.traffic.models, models.dataplane, self._pools, health)
        if self._folder is not None:
            self._kserve = replace(self._kserve, spread=self._spread)
        self._database = open_database(config)
        self._ledger = build_ledger(config, self._database)
        self._records = RequestRecords(config, models.dataplane, self._ledger)
        self._keys = build_keys(config, self._ledger)
        metrics = Metrics(self._metrics, models.triton_metrics)
        settings = app_settings(
            config,
            self._keys,
            metrics,
            self._records.journal,
            health,
            self._records.load_reports,
        )
        self._settings = replace(settings, pools=self._pools)
        by_tensors = TensorModels(self._kserve, models.dataplane.models, self._settings)
        models.dataplane.models.changes.watch(by_tensors.look)
        self._drain = self._settings.drain
        watch = RequestWatch(self._records.journal, self._drain)
        self._requests = ServerRequests(watch, None if self._folder is None else self)
        self._intake = self._settings.intake
        self._guard = RpcGuard(
            self._keys,
            self._drain,
            self._records.journal,
            build_restrictions(config, "grpc"),
            self._intake,
            self._records.load_reports,
        )
        """Of RPCs, whatever transport they come by."""
        self._endpoints = batch_endpoints(models.dataplane, self._settings, models.pooling)
        models.traffic.answer_by(self._endpoints, self._settings)
        self._batches = build_batches(config, self._database, self._endpoints, self._settings)
        if self._batches is not None:
            models.dataplane.image_sources.files = self._batches.files
        self._responses = build_responses(config, self._database, self._settings)
        self.app = build_app(
            models.dataplane,
            self._settings,
            self._kserve,
            models.pooling,
            self._batches,
            self._responses,
            models.traffic.table,
            self._ledger,
            self._console_routes(),
        )
        """What the HTTP port answers."""
        self._http = HttpServer(self.app, http_settings(config, self._intake))
        if self._folder is None:
            self._ports: OpenPorts | FrontPorts = OpenPorts(
                config, self._http, self._new_operator_port(), self._new_grpc_server, self._signals
            )
        else:
            self._ports = self._new_front_ports(self._folder)
            metrics.other_processes = self._ports.fronts

    def _console_routes(self) -> Sequence[Route]:
        """None where there is no console. Raises ConfigError."""
        if not shows_console(self._config.server):
            return ()
        from penstock.gateway.apis.console.routes import console_routes
        from penstock.gateway.apis.console.views import ConsoleSources

        models = self._models
        sources = ConsoleSources(
            version=self._settings.version,
            dataplane=models.dataplane,
            models=models.traffic.models,
            traffic=models.traffic.table,
            budget=models.budget,
            health=self._kserve.health,
            drain=self._drain,
            requests=self._requests,
        )
        return console_routes(sources, self._keys)

    async def watch_requests(self, choice: RequestChoice) -> list[WatchedRequests]:
        """Implements FrontRequests."""
        return [] if isinstance(self._ports, OpenPorts) else await self._ports.fronts.watch_requests(choice)

    async def cancel_request(self, request: str) -> bool:
        """Implements FrontRequests."""
        return not isinstance(self._ports, OpenPorts) and await self._ports.fronts.cancel_request(request)

    def _metrics(self) -> Iterator[Source]:
        yield from self._models.metrics()
        yield self._records.metrics
        yield IntakeMetrics(self._intake, self._pools)
        yield HttpPortMetrics(self._http.connections_by_version)
        if self._batches is not None:
            yield self._batches

    def _new_operator_port(self) -> HttpServer:
        server, dataplane = self._config.server, self._models.dataplane
        routes = operator_routes(self._config, dataplane, self._requests)
        app = build_metrics_app(dataplane, metrics_settings(self._config, self._settings), routes)
        limits = connection_limits(self._config)
        settings = ServerSettings(host=server.address("metrics"), port=server.metrics_port, limits=limits, http2=False)
        return HttpServer(app, settings)

    def _new_grpc_server(self) -> GrpcServer:
        return GrpcServer(grpc_settings(self._config), self._kserve, self._would_serve, self._guard)

    def _new_front_ports(self, folder: FrontFolder) -> FrontPorts:
        from penstock.gateway.server.front_ports import FrontPorts, Shared

        shared = Shared(
            app=self.app,
            kserve=self._kserve,
            guard=self._guard,
            would_serve=self._would_serve,
            settings=self._settings,
            dataplane=self._models.dataplane,
            models=self._models.repository,
            traffic=self._models.traffic.table,
            signals=self._signals,
            ledger=self._ledger,
        )
        return FrontPorts(self._config, folder, shared, self._new_operator_port())

    async def _spread(self) -> None:
        if not isinstance(self._ports, OpenPorts):
            await self._ports.spread()

    def _would_serve(self) -> bool:
        return self._loaded and self._models.ready and not self._drain.leaving

    @property
    def engines(self) -> list[Engine]:
        """Of the language models that are loaded."""
        return self._models.engines

    @property
    def live(self) -> bool:
        return self._models.is_live()

    @property
    def ready(self) -> bool:
        """The models are loaded, and it does not drain."""
        return self._would_serve()

    @property
    def drain(self) -> DrainState:
        return self._drain

    def grpc_service(self) -> Service:
        """What the gRPC port answers, for another transport. Raises ConfigError."""
        return build_service(self._kserve, self._guard, HealthService(self._would_serve), grpc_settings(self._config))

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
        self._manager.start_watchdog(self._models.is_live)
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
        except Exception as error:
            known = isinstance(error, PenstockError | ConfigError)
            if self._loaded and not known:
                raise
            text = as_flags(str(error), SETTINGS) if known else as_load_error(error).message
            logger.error("%s%s", "" if self._loaded else "the models could not be loaded: ", text)
            status = 1
        if self._loaded and file is None and not status:
            await self._leave()
        await self._shut_down()
        return 1 if self._signals.failed else status

    async def _load(self, file: BatchFile | None) -> None:
        """Answers the file, too, where there is one."""
        await self._models.start()
        end_unused()
        self._loaded = True
        if self._batches is not None:
            await self._batches.start()
        if file is not None:
            await file.answer(self._endpoints, self._settings, self._models.is_live)
            return
        settle()
        self._manager.ready("ready")
        if self._config.repository.model_repository:
            served = [f"{model.name} {model.version}" for model in self._models.repository.models() if model.ready]
            logger.info("ready: %d models: %s", len(served), ", ".join(served) or "none is loaded yet")
        if sys.stderr.isatty():
            self._show_first_steps()

    def _show_first_steps(self) -> None:
        """For a person who has just started a server and looks at its log."""
        server = self._config.server
        if not server.allow_http:
            return
        url = self._ports.http_url(reachable_host(server.address("http")))
        if shows_console(server):
            logger.info("a browser shows what the server does: %s/console", url)
        first_model = self._models.first_to_ask
        if first_model is not None:
            logger.info("%s", first_steps(url, *first_model, needs_key=self._keys.needed))

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
            logger.info("not ready; new requests are still served for %g s", delay)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._signals.hurry.wait(), delay)

    def _tell_manager_of_end(self, status: str, delay: float = 0.0) -> None:
        self._manager.stopping(status, delay + self._config.server.drain_timeout + _STOP_SECONDS)

    async def _shut_down(self) -> None:
        ends = asyncio.get_running_loop().time() + self._config.server.drain_timeout
        await self._ports.refuse(self._drain)
        self._tell_manager_of_end(f"draining {self._drain.in_flight} requests")
        self._models.traffic.table.stop_shadows()
        if self._batches is not None:
            await self._batches.stop()
        if self._drain.in_flight:
            logger.info("draining %d requests", self._drain.in_flight)
        await self._wait_until_idle()
        self._drain.expire()
        await self._responses.stop()
        await self._ports.stop()
        self._ledger.write()
        self._database.close()
        await self._models.stop(lambda unloading: self._give_models_time(unloading, ends))
        self._intake.lag.stop()
        self._kserve.tracing.close()
        self._records.close()
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
        await asyncio.gather(self._drain.wait_idle(), self._models.drain())

    async def _give_models_time(self, unloading: asyncio.Task[None], ends: float) -> None:
        await self._wait_in_hurry(unloading, max(_UNLOAD_SECONDS, ends - asyncio.get_running_loop().time()))

    async def _wait_in_hurry(self, task: asyncio.Task[Any], seconds: float | None = None) -> None:
        """Until the task is done, the time is over, or a second signal has come."""
        hurry = asyncio.create_task(self._signals.hurry.wait())
        await asyncio.wait((task, hurry), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
