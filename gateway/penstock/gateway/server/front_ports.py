"""The ports of a server with several fronts: they accept on the public ones and ask this process for what is shared."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from socket import socket
from typing import Literal

import msgspec
from starlette.types import ASGIApp

from penstock.engines.errors import EngineError
from penstock.engines.host.cores import usable_cores
from penstock.gateway.apis.kserve.context import KServe
from penstock.gateway.apis.kserve.grpc.health import HealthService
from penstock.gateway.apis.kserve.grpc.rpc import RpcGuard
from penstock.gateway.apis.kserve.grpc.service import build_service
from penstock.gateway.apis.usage.ledger import UsageLedger
from penstock.gateway.configuration.config import Config, ConfigError
from penstock.gateway.configuration.sections.other_models import TrafficConfig
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.models.repository.manager import ModelRepository
from penstock.gateway.models.traffic.table import TrafficTable
from penstock.gateway.processes.fronts.front_process import Services
from penstock.gateway.processes.fronts.messages import Begin, FromSupervisor, Logs, ReadAgain
from penstock.gateway.processes.fronts.model_table import Doors, ModelTable
from penstock.gateway.processes.fronts.quotas import keys_message
from penstock.gateway.processes.fronts.supervisor import Fronts, reserve
from penstock.gateway.processes.model_host.host import ModelHost
from penstock.gateway.processes.model_host.publication import Sources, is_classic, no_model
from penstock.gateway.requests.acceptor import cannot_listen
from penstock.gateway.requests.addresses import url_host
from penstock.gateway.requests.call import DrainState
from penstock.gateway.requests.quota import Quota
from penstock.gateway.server.composition.ports import grpc_settings, tls_settings
from penstock.gateway.server.signals import ServerSignals
from penstock.gateway.transports.http.server import HttpServer
from penstock.gateway.transports.http.settings import AppSettings

logger = logging.getLogger("penstock")

_CORES_OF_FRONT, _MOST_BY_ITSELF = 8, 8
_TRACES_OF_A_FRONT = 1 << 32
"""The numbers of a front's traces begin at a multiple of this."""
_STOP_SECONDS = 15.0
"""That fronts may take to close their connections, before they are killed."""


def front_count(config: Config) -> int:
    """Raises ConfigError for options that only one front has."""
    fronts = config.server.fronts
    count = max(1, min(usable_cores() // _CORES_OF_FRONT, _MOST_BY_ITSELF)) if fronts == "auto" else fronts
    if count > 1:
        if sys.platform != "linux":
            raise ConfigError("fronts: several share a port on Linux only")
        if config.grpc.grpc_transport != "penstock":
            raise ConfigError("fronts: several need --grpc-transport=penstock")
    return count


class FrontFolder:
    """Of this user alone (0700): sockets of the server's engines, for its fronts."""

    def __init__(self, fronts: int) -> None:
        self.fronts = fronts
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True)
        self.path = Path(self._folder.name)
        self.doors = Doors(self.path, fronts)

    def remove(self) -> None:
        self._folder.cleanup()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What this process has for all fronts."""

    app: ASGIApp
    """Answers HTTP requests that fronts do not serve themselves."""
    kserve: KServe
    guard: RpcGuard
    """Of gRPC."""
    would_serve: Callable[[], bool]
    settings: AppSettings
    dataplane: DataPlane
    models: ModelRepository
    traffic: TrafficTable
    signals: ServerSignals
    ledger: UsageLedger


class FrontPorts:
    """In the place of OpenPorts."""

    def __init__(self, config: Config, folder: FrontFolder, shared: Shared, metrics: HttpServer) -> None:
        """`metrics`: the port that this process opens itself. Raises ConfigError."""
        self._config = config
        self._folder = folder
        self._shared = shared
        self._metrics = metrics
        self._keys = shared.settings.keys
        self._ports: dict[Literal["http", "grpc"], int] = {}
        self._host = self._new_host()
        self._starts = count()
        self._health = HealthService(shared.would_serve)
        service = build_service(shared.kserve, shared.guard, self._health, grpc_settings(config))
        self.fronts = Fronts(
            self._first,
            ModelTable(shared.dataplane, shared.models, empty=config.repository.load_on_demand),
            shared.models,
            Services(
                host=self._host,
                drain=shared.settings.drain,
                quota_of=self._quota_of,
                add_usage=shared.ledger.add,
                app=shared.app,
                find_handler=service.service,
                crash_folder=config.server.crash_folder,
            ),
            lambda: shared.traffic.names,
            self._all_gone,
        )
        grpc_tls = tls_settings(config, "grpc")
        if grpc_tls.enabled:
            grpc_tls.read()

    def _quota_of(self, digest: bytes) -> Quota | None:
        principal = (self._keys.granted or {}).get(digest)
        return None if principal is None else principal.quota

    def _all_gone(self) -> None:
        logger.critical("no front is left")
        self._shared.signals.fail()

    # Opening

    async def open(self) -> None:
        """Raises ConfigError."""
        server = self._config.server
        try:
            self._shared.dataplane.models.changes.watch(self._host.publish)
            sockets = self._reserved()
            if server.allow_metrics:
                await self._open_metrics()
            if sockets:
                await self._start_fronts(sockets)
        except (OSError, EngineError) as error:
            await self.stop()
            raise ConfigError(f"fronts: {error}") from None
        except BaseException:
            await self.stop()
            raise
        self._health.start()
        logger.info(
            "listening on %s (gRPC %s, metrics %s), with %d fronts",
            self.http_url(server.address("http")) if server.allow_http else "-",
            self._ports.get("grpc", "-"),
            self._metrics.port if server.allow_metrics else "-",
            self._folder.fronts,
        )

    def _new_host(self) -> ModelHost:
        """Of nothing where requests load models: who uses them is counted with the requests that are passed on."""
        kserve = self._shared.kserve
        serves = no_model if self._config.repository.load_on_demand else is_classic
        return ModelHost(Sources(self._shared.models, kserve.shared_memory, kserve.tracing, serves))

    async def spread(self) -> None:
        """Returns when all fronts know the regions of shared memory and the settings of traces."""
        await self._host.spread()

    def _reserved(self) -> list[dict[str, socket]]:
        """For each front, its sockets by port. Raises ConfigError."""
        server = self._config.server
        slots: list[dict[str, socket]] = [{} for _ in range(self._folder.fronts)]
        ports: tuple[tuple[Literal["http", "grpc"], int, bool], ...] = (
            ("http", server.http_port, server.allow_http),
            ("grpc", server.grpc_port, server.allow_grpc),
        )
        for kind, port, opens in ports:
            if not opens:
                continue
            try:
                sockets = reserve(server.address(kind), port, self._folder.fronts)
            except OSError as error:
                raise cannot_listen(server, kind, error) from None
            self._ports[kind] = int(sockets[0].getsockname()[1])
            for slot, listening in zip(slots, sockets, strict=True):
                slot[kind] = listening
        return slots if self._ports else []

    async def _open_metrics(self) -> None:
        try:
            await self._metrics.start()
        except OSError as error:
            raise cannot_listen(self._config.server, "metrics", error) from None

    async def _start_fronts(self, sockets: list[dict[str, socket]]) -> None:
        shared, fronts = self._shared, self.fronts
        await fronts.start(sockets)
        shared.dataplane.models.changes.watch(fronts.tables_changed)
        shared.traffic.on_change(fronts.tables_changed)
        self._keys.changes.watch(lambda: fronts.tell(keys_message(self._keys.granted)))
        shared.kserve.logs.changes.watch(lambda: fronts.tell(self._logs()))
        tls = [tls_settings(self._config, port) for port in self._ports]
        if any(settings.enabled for settings in tls):
            shared.signals.on_hangup(lambda: fronts.tell(ReadAgain()))
        for settings in tls:
            if settings.unused:
                logger.warning("%s is not used: --%s-use-ssl turns TLS on", settings.unused, settings.port)

    def _first(self, number: int) -> Sequence[FromSupervisor]:
        """What a front is told at its start."""
        # Rules are at work in this process alone, and which requests are traced the model host tells.
        server = msgspec.structs.replace(self._config.server, trace_config=())
        config = msgspec.structs.replace(self._config, traffic=TrafficConfig(), server=server)
        begin = Begin(
            number=number,
            fronts=self._folder.fronts,
            config=config,
            salt_key=self._shared.dataplane.salt_key,
            folder=str(self._folder.path),
            first_trace=next(self._starts) * _TRACES_OF_A_FRONT + 1,
            listens=tuple(self._ports),
        )
        return [begin, keys_message(self._keys.granted), self._logs()]

    def _logs(self) -> Logs:
        settings = self._shared.kserve.logs.settings()
        return Logs(settings={name: value for name, value in settings.items() if name != "log_file"})

    def http_url(self, host: str) -> str:
        scheme = "https" if tls_settings(self._config, "http").enabled else "http"
        return f"{scheme}://{url_host(host)}:{self._ports['http']}"

    # The end

    async def drain(self) -> None:
        """Fronts send clients elsewhere, and serve what still comes."""
        self._health.close()
        self.fronts.leave()

    async def refuse(self, drain: DrainState) -> None:
        """Begins the drain: fronts take no new requests. Their HTTP ports are open until `stop`, and probes are
        answered."""
        self._health.close()
        drain.begin()
        self.fronts.drain()

    async def stop(self) -> None:
        self._health.close()
        await self.fronts.stop(_STOP_SECONDS)
        await self._metrics.stop()
        self._host.stop()
        self._folder.remove()
