"""The ports of a server, from their opening to their end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal

from penstock.gateway.apis.kserve.grpc.server import GrpcServer
from penstock.gateway.configuration.config import Config
from penstock.gateway.requests.acceptor import cannot_listen
from penstock.gateway.requests.addresses import url_host
from penstock.gateway.requests.call import DrainState
from penstock.gateway.requests.tls import TlsSettings
from penstock.gateway.server.composition.ports import tls_settings
from penstock.gateway.server.signals import ServerSignals
from penstock.gateway.transports.grpc.server import Http2Transport
from penstock.gateway.transports.http.server import HttpServer

logger = logging.getLogger("penstock")


async def begin_drain(drain: DrainState, http: HttpServer | None, grpc: GrpcServer | Http2Transport | None) -> None:
    """gRPC's clients know that the port closes before calls are refused: most take a refusal for the answer."""
    if grpc is not None:
        await grpc.leave()
    drain.begin()
    if http is not None:
        http.drain()
    if grpc is not None:
        grpc.refuse()


class OpenPorts:
    """Certificates are read again at SIGHUP."""

    def __init__(
        self,
        config: Config,
        http: HttpServer,
        metrics: HttpServer,
        new_grpc_server: Callable[[], GrpcServer],
        signals: ServerSignals,
    ) -> None:
        """A gRPC server needs a running event loop, and takes its port when it is made."""
        self._config = config
        self._http = http
        self._metrics = metrics
        self._new_grpc_server = new_grpc_server
        self._signals = signals
        self._grpc: GrpcServer | None = None
        self._open: list[HttpServer | GrpcServer] = []

    async def open(self) -> None:
        """Raises ConfigError."""
        server = self._config.server
        http_tls = tls_settings(self._config, "http")
        if server.allow_http:
            await self._open_http(self._http, "http")
            self._reload_certificates_of(self._http, http_tls)
        if server.allow_metrics:
            await self._open_http(self._metrics, "metrics")
        if server.allow_grpc:
            self._grpc = await self._open_grpc()
            self._reload_certificates_of(self._grpc, tls_settings(self._config, "grpc"))
        if not self._open:
            return
        logger.info(
            "listening on %s (gRPC %s, metrics %s)",
            self.http_url(server.address("http")) if server.allow_http else "-",
            self._grpc.port if self._grpc is not None else "-",
            self._metrics.port if server.allow_metrics else "-",
        )

    def http_url(self, host: str) -> str:
        scheme = "https" if tls_settings(self._config, "http").enabled else "http"
        return f"{scheme}://{url_host(host)}:{self._http.port}"

    async def _open_http(self, port: HttpServer, kind: Literal["http", "metrics"]) -> None:
        try:
            await port.start()
        except OSError as error:
            raise cannot_listen(self._config.server, kind, error) from None
        self._open.append(port)

    async def _open_grpc(self) -> GrpcServer:
        try:
            port = self._new_grpc_server()
        except OSError as error:
            raise cannot_listen(self._config.server, "grpc", error) from None
        self._open.append(port)
        await port.start()
        return port

    def _reload_certificates_of(self, port: HttpServer | GrpcServer, tls: TlsSettings) -> None:
        if tls.enabled:
            self._signals.on_hangup(port.reload_certificates)
        elif tls.unused:
            logger.warning("%s is not used: --%s-use-ssl turns TLS on", tls.unused, tls.port)

    async def drain(self) -> None:
        """gRPC's health says that nothing new should come. Clients with connections of HTTP/2, gRPC's among them, are
        sent to new ones."""
        self._http.drain()
        if self._grpc is not None:
            await self._grpc.drain()

    async def refuse(self, drain: DrainState) -> None:
        """Begins the drain: nothing new is taken. The HTTP port is open until `stop`, to say so; gRPC's closes."""
        await begin_drain(drain, self._http, self._grpc)

    async def stop(self) -> None:
        await asyncio.gather(*(port.stop() for port in self._open))
