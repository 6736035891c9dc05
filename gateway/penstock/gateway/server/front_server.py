"""A front: the process that speaks the protocols where a server has several. The supervisor starts it and tells it what
to serve; when the supervisor is gone, so is the front.

python -m penstock.gateway.server.front_server BLACK_BOX CONTROL INBOX OUTBOX SOCKET...   (descriptors)
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from socket import socket

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from penstock.engines.door.attached import AttachedEngine
from penstock.engines.door.spec import DoorAddress
from penstock.engines.errors import PenstockError
from penstock.engines.host.black_box import record_into
from penstock.engines.host.kernel_files import kernel_text
from penstock.gateway.apis.kserve.grpc.server import http2_transport
from penstock.gateway.apis.usage.ledger import usage_of
from penstock.gateway.configuration.config import Config, ConfigError
from penstock.gateway.metrics.registry import Metrics
from penstock.gateway.metrics.request_metrics import HttpPortMetrics, IntakeMetrics
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.models.language.engine_sharing import watchdog_config
from penstock.gateway.processes.fronts.counts import samples_of, take
from penstock.gateway.processes.fronts.forwarding import Forwarder
from penstock.gateway.processes.fronts.front_models import FrontModels
from penstock.gateway.processes.fronts.grpc_front import FrontGuard, FrontService
from penstock.gateway.processes.fronts.http_front import FrontApp
from penstock.gateway.processes.fronts.messages import (
    Begin,
    Cancelled,
    CancelRequest,
    Counted,
    Drain,
    Expire,
    Failed,
    FromSupervisor,
    Granted,
    Holds,
    Idle,
    Keys,
    Leave,
    Logs,
    ModelReport,
    ReadAgain,
    Report,
    Reported,
    RequestsWatched,
    Serving,
    Stop,
    Table,
    WatchRequests,
    decode_from_supervisor,
)
from penstock.gateway.processes.fronts.passing import FromAnswering, PassedMessage
from penstock.gateway.processes.fronts.quotas import QuotaClient, granted_by
from penstock.gateway.processes.model_host.connection import HostConnection
from penstock.gateway.processes.model_host.host_link import HostLink
from penstock.gateway.processes.model_host.messages import DownMessage
from penstock.gateway.requests.access import ApiKeys
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.requests.heap import settle
from penstock.gateway.requests.intake import BodyIntake, WorkPools
from penstock.gateway.requests.loops import loop_factory
from penstock.gateway.requests.request_watch import RequestWatch
from penstock.gateway.requests.server_health import ServerHealth
from penstock.gateway.requests.server_log import set_up_log
from penstock.gateway.server.composition.models import build_image_sources
from penstock.gateway.server.composition.ports import (
    app_settings,
    build_kserve,
    build_restrictions,
    grpc_settings,
    http_settings,
)
from penstock.gateway.server.composition.records import RequestRecords
from penstock.gateway.server.open_ports import begin_drain
from penstock.gateway.transports.grpc.server import Http2Transport
from penstock.gateway.transports.http.server import HttpServer

logger = logging.getLogger("penstock")

_LEAST_BODY_BYTES = 64 << 20
_PASSED_ON, _LEAST_PASSED_ON = 4096, 256
"""Requests that fronts pass on to the supervisor at a time: of all together, and of each."""
_GRPC_GRACE = 1.0
_ENGINE_WAIT = 30.0
"""Seconds after which a front tells that an engine cannot be reached, and tries again."""


def main() -> int:
    box, control, inbox, outbox, *listeners = map(int, sys.argv[1:])
    record_into(box)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the supervisor says what they mean
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_run(socket(fileno=control), inbox, outbox, listeners))


async def _run(control: socket, inbox: int, outbox: int, listeners: list[int]) -> int:
    supervisor = Supervisor(inbox, outbox)
    await supervisor.connection.open(control)
    begin = await supervisor.next_message()
    if not isinstance(begin, Begin):
        return 1
    sockets = {port: socket(fileno=descriptor) for port, descriptor in zip(begin.listens, listeners, strict=True)}
    set_up_log(begin.config.server.logging_level, logging.StreamHandler(sys.stderr), f"front {begin.number}: ")
    try:
        front = _Front(begin, supervisor, sockets)
        while (message := await supervisor.next_message()) is not None:
            front.take(message)
            if isinstance(message, Table):  # before it keys and models have come: now connections are accepted
                break
        await front.start()
    except (ConfigError, PenstockError, OSError) as error:
        supervisor.send(Failed(reason=str(error)))
        await supervisor.connection.end()
        return 1
    while (message := await supervisor.next_message()) is not None:
        if isinstance(message, Stop):
            await front.stop()
            return 0
        front.take(message)
    if os.getppid() == supervisor.pid:
        logger.error("the connection to the supervisor is lost: this front ends")
    else:
        logger.error("the supervisor is gone: this front ends")
        shutil.rmtree(begin.folder, ignore_errors=True)
    return 1


class Supervisor:
    """A front's end of the border: messages of the supervisor, and the models that it has."""

    link: HostLink
    """When the first message has come."""
    forwarder: Forwarder | None = None
    """What has requests on the connection."""

    def __init__(self, inbox: int, outbox: int) -> None:
        """The files of the two arenas."""
        self.pid = os.getppid()
        self._messages: asyncio.Queue[FromSupervisor | None] = asyncio.Queue()
        self.connection = HostConnection(inbox, outbox, decode_from_supervisor, self._heard, self._lost)
        self.send = self.connection.send

    async def next_message(self) -> FromSupervisor | None:
        """None: the connection has ended."""
        if self.connection.ended.done() and self._messages.empty():
            return None
        return await self._messages.get()

    def _heard(self, message: FromSupervisor | DownMessage | FromAnswering, tail: memoryview) -> None:
        if isinstance(message, PassedMessage):
            if self.forwarder is not None:
                self.forwarder.heard(message, tail)
            return
        if isinstance(message, DownMessage):
            self.link.heard(message, tail)
            return
        if isinstance(message, Begin):
            allow = message.config.server.allow_client_shm
            self.link = HostLink(self.connection, message.first_trace, self.pid, allow_client_shm=allow)
        self._messages.put_nowait(message)

    def _lost(self) -> None:
        if hasattr(self, "link"):
            self.link.lost()
        if self.forwarder is not None:
            self.forwarder.lost()
        self._messages.put_nowait(None)


class _Front:
    """Everything that lives as long as the process."""

    def __init__(self, begin: Begin, supervisor: Supervisor, sockets: dict[str, socket]) -> None:
        """Raises ConfigError."""
        config = begin.config
        self._begin = begin
        self._supervisor = supervisor
        link = supervisor.link
        pools = WorkPools()
        dataplane = DataPlane(
            request_timeout=config.models.scheduling.request_timeout or None,
            clamp_max_tokens=config.server.clamp_max_tokens,
            text_pool=pools.text,
            salt_key=begin.salt_key,
            image_sources=build_image_sources(config),
        )
        self._models = FrontModels(dataplane, link.models, self._attach, self._hold)
        self._keys = ApiKeys({} if config.server.has_keys else None)
        self._quotas = QuotaClient(supervisor.send)
        self._records = RequestRecords(config, dataplane, self._tell_usage)
        self._journal, load = self._records.journal, self._records.load_reports
        self._metrics = Metrics(
            lambda: (self._records.metrics, IntakeMetrics(self._intake, pools), *self._port_metrics(), self), list
        )
        settings = app_settings(config, self._keys, self._metrics, self._journal, ServerHealth(), load)
        bodies = max(_LEAST_BODY_BYTES, config.server.body_memory // begin.fronts)
        settings = replace(settings, intake=BodyIntake(bodies, config.server.max_loop_lag), pools=pools)
        self._drain, self._intake = settings.drain, settings.intake
        self._watch = RequestWatch(self._journal, self._drain)
        kserve = build_kserve(config, self._models.store, dataplane, pools, ServerHealth())
        kserve = replace(kserve, shared_memory=link.shared_memory, tracing=link.tracing)
        self._logs = kserve.logs
        supervisor.forwarder = forwarder = Forwarder(supervisor.send, max(_LEAST_PASSED_ON, _PASSED_ON // begin.fronts))
        app = FrontApp(self._models, settings, kserve, forwarder, self._quotas)
        self._http: HttpServer | None = None
        if "http" in sockets:
            self._http = HttpServer(app, http_settings(config, self._intake, sockets["http"]))
        guard = FrontGuard(
            self._quotas, self._keys, self._drain, self._journal, build_restrictions(config, "grpc"), self._intake, load
        )
        service = FrontService(kserve, guard, grpc_settings(config), self._models, forwarder)
        self._grpc = self._new_grpc_server(service, config, sockets["grpc"]) if "grpc" in sockets else None
        self._draining: asyncio.Task[None] | None = None

    def _tell_usage(self, context: RequestContext) -> None:
        usage = usage_of(context)
        if usage is not None:
            self._supervisor.send(Counted(usage=usage))

    def _new_grpc_server(self, service: FrontService, config: Config, listener: socket) -> Http2Transport:
        return http2_transport(grpc_settings(config), service.service, self._intake, listener)

    def _attach(self, door: DoorAddress) -> AttachedEngine:
        watchdog = watchdog_config(self._begin.config.server)
        watchdog = msgspec.structs.replace(watchdog, load_timeout=_ENGINE_WAIT)
        return AttachedEngine(door, watchdog, name=f"front {self._begin.number}")

    def _hold(self, holds: Holds) -> None:
        self._supervisor.send(holds)

    async def start(self) -> None:
        """Raises OSError."""
        self._intake.lag.start()
        for port in (self._http, self._grpc):
            if port is not None:
                await port.start()
        settle()
        self._supervisor.send(Serving())

    def take(self, message: FromSupervisor) -> None:
        match message:
            case Table():
                self._models.apply(message)
            case Keys():
                self._keys.replace(granted_by(message) or {})
            case Granted():
                self._quotas.answered(message)
            case Logs():
                self._logs.update(message.settings)
            case ReadAgain():
                for port in (self._http, self._grpc):
                    if port is not None:
                        port.reload_certificates()
            case Report():
                self._supervisor.send(self._report(message.id))
            case WatchRequests():
                watched = self._watch.look(message.choice)
                self._supervisor.send(RequestsWatched(id=message.id, requests=watched))
            case CancelRequest():
                self._supervisor.send(Cancelled(id=message.id, done=self._watch.cancel(message.request)))
            case Leave():
                self._drain.leave()
                for port in (self._http, self._grpc):
                    if port is not None:
                        port.drain()
            case Drain():
                self._draining = asyncio.create_task(self._drain_until_idle())
            case Expire():
                self._drain.expire()

    async def _drain_until_idle(self) -> None:
        await begin_drain(self._drain, self._http, self._grpc)
        await self._drain.wait_idle()
        self._supervisor.send(Idle())

    # What is counted

    def _report(self, number: int) -> Reported:
        statistics = [
            ModelReport(
                id=id,
                name=model.name,
                version=model.version,
                counts=take(model.statistics),
                pending=model.statistics.pending,
            )
            for id, _, models in self._models.all()
            for model in models
        ]
        return Reported(id=number, samples=samples_of(self._metrics.collect()), statistics=statistics)

    def _port_metrics(self) -> list[HttpPortMetrics]:
        return [] if self._http is None else [HttpPortMetrics(self._http.connections_by_version)]

    def collect(self) -> Iterator[Metric]:
        """Of the models and of the process."""
        for _, model, _ in self._models.all():
            yield from model.metrics.of_requests()
        labels = ["front"]
        text = "CPU time of each front process."
        cpu = CounterMetricFamily("penstock_front_cpu_seconds", text, labels=labels)
        cpu.add_metric([str(self._begin.number)], time.process_time())
        text = "Memory of each front process."
        memory = GaugeMetricFamily("penstock_front_resident_memory_bytes", text, labels=labels)
        memory.add_metric([str(self._begin.number)], _resident_bytes())
        yield from (cpu, memory)

    # The end

    async def stop(self) -> None:
        self._drain.expire()
        ports = [] if self._http is None else [self._http.stop()]
        if self._grpc is not None:
            ports.append(self._grpc.stop(_GRPC_GRACE))
        await asyncio.gather(*ports)
        await self._models.stop()
        self._supervisor.connection.close()
        self._quotas.close()
        self._intake.lag.stop()
        self._records.close()


def _resident_bytes() -> int:
    """0 where the system does not tell."""
    pages = kernel_text(Path("/proc/self/statm")).split()
    return int(pages[1]) * resource.getpagesize() if len(pages) > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
