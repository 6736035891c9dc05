"""The life of a server process: start, serve, drain, stop.

The ports answer from the first moment: liveness is 200, readiness 503 until the model is loaded. SIGTERM and SIGINT
drain: readiness turns 503, new work is refused with 503 and Retry-After, what runs may end within `drain_timeout`, and
what is left then ends with an error event. A second signal does not wait.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable
from dataclasses import replace

from penstock.engines.errors import PenstockError
from penstock.gateway.app import app_settings, build_dataplane, build_model
from penstock.gateway.config import Config, ConfigError
from penstock.gateway.grpc_health import GrpcServer, url_host
from penstock.gateway.http.app import build_app, build_metrics_app
from penstock.gateway.http.limits import ConnectionLimits
from penstock.gateway.http.server import HttpServer, ServerSettings
from penstock.gateway.metrics import Metrics
from penstock.gateway.models import LoadedModel, ModelSource, find_model
from penstock.gateway.operator import operator_routes

logger = logging.getLogger("penstock")


def serve(config: Config) -> int:
    """Runs a server until it is told to stop; returns the exit status."""
    logging.basicConfig(
        level=config.server.log_level.upper(), format="%(asctime)s %(levelname)-7s %(message)s", stream=sys.stderr
    )
    for library in ("grpc", "asyncio"):
        logging.getLogger(library).setLevel(logging.WARNING)  # at level debug they drown out everything else
    try:
        source = find_model(config.model.model)
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_Server(config, source).run())
    except (ConfigError, PenstockError) as error:
        logger.error("%s", error)
        return 1
    except KeyboardInterrupt:  # while a model is downloaded, before the server handles signals
        return 130


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:  # no wheels for Windows
        return None
    return uvloop.new_event_loop


class _Server:
    """Everything that lives as long as the process."""

    def __init__(self, config: Config, source: ModelSource) -> None:
        self._config = config
        metrics = Metrics()
        self._dataplane = build_dataplane(config)
        self._model: LoadedModel = build_model(config, source, metrics)
        self._dataplane.add(self._model)
        settings = app_settings(config, metrics)
        self._drain = settings.drain
        server = config.server
        limits = replace(ConnectionLimits(), send_timeout=server.send_timeout)
        self._http = HttpServer(
            build_app(self._dataplane, settings), ServerSettings(host=server.host, port=server.http_port, limits=limits)
        )
        self._operator = HttpServer(
            build_metrics_app(self._dataplane, settings, operator_routes(self._dataplane)),
            ServerSettings(host=server.host, port=server.metrics_port),
        )
        self._signals = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        self._handle_signals()
        grpc = await self._listen()
        loading = asyncio.create_task(self._load())
        stopping = asyncio.create_task(self._signals.wait())
        status = 0
        try:
            await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                await stopping
            else:
                loading.cancel()
        except PenstockError as error:
            logger.error("the model could not be loaded: %s", error.message)
            status = 1
        await self._shut_down(grpc)
        return status

    async def _listen(self) -> GrpcServer:
        server = self._config.server
        try:
            await self._http.start()
            await self._operator.start()
            grpc = GrpcServer(server.host, server.grpc_port, self._ready)
        except OSError as error:
            raise ConfigError(f"cannot listen: {error.strerror or error}") from None
        await grpc.start()
        logger.info(
            "listening on http://%s:%d (gRPC health %d, metrics %d)",
            url_host(server.host),
            self._http.port,
            grpc.port,
            self._operator.port,
        )
        return grpc

    def _ready(self) -> bool:
        return self._dataplane.ready and not self._drain.draining

    async def _load(self) -> None:
        model = self._model
        await model.engine.start()
        model.loaded = True
        info = model.engine.info
        # The gateway's long-lived objects are all made now: keep them out of every later collection.
        gc.collect()
        gc.freeze()
        logger.info(
            "ready: %s on %s; context %d tokens, KV cache %d tokens",
            model.names[0],
            info.runner,
            info.context_length,
            info.num_blocks * info.block_size,
        )

    def _handle_signals(self) -> None:
        def received(name: str) -> None:
            if self._signals.is_set():
                logger.warning("%s again: stopping at once", name)
                self._hurry.set()
            self._signals.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, received, number.name)

    async def _shut_down(self, grpc: GrpcServer) -> None:
        self._drain.begin()
        await grpc.drain()
        if self._drain.in_flight:
            logger.info("draining %d requests", self._drain.in_flight)
        await self._wait_until_idle()
        self._drain.expire()
        await asyncio.gather(self._http.stop(), self._operator.stop(), grpc.stop())
        await self._model.engine.stop()
        logger.info("stopped")

    async def _wait_until_idle(self) -> None:
        idle = asyncio.create_task(self._drain.wait_idle(self._config.server.drain_timeout))
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait((idle, hurry), return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        hurry.cancel()
