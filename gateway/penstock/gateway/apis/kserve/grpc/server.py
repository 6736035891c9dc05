"""The gRPC port of a server process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from socket import socket

import grpc

from penstock.gateway.apis.kserve.context import KServe
from penstock.gateway.apis.kserve.grpc.health import HealthService
from penstock.gateway.apis.kserve.grpc.rpc import RpcGuard
from penstock.gateway.apis.kserve.grpc.service import Service, build_service
from penstock.gateway.apis.kserve.grpc.settings import GrpcSettings
from penstock.gateway.requests.acceptor import listener
from penstock.gateway.requests.addresses import url_host
from penstock.gateway.requests.call import DrainState, RequestJournal
from penstock.gateway.requests.intake import BodyIntake
from penstock.gateway.requests.tls import Certificates, ReloadedCertificates
from penstock.gateway.transports.grpc.server import FindHandler, Http2Transport

_GRACE_SECONDS = 1.0


class GrpcServer:
    """Serves from `start` to `stop`. Made and used on the event loop."""

    def __init__(
        self,
        settings: GrpcSettings,
        kserve: KServe,
        ready: Callable[[], bool],
        guard: RpcGuard | None = None,
    ) -> None:
        """Binds. `ready` says whether the server as a whole is; without `guard` everybody is let in.

        Raises OSError when the address cannot be bound, ConfigError, with the flag to blame, when the TLS files are not
        usable.
        """
        guard = guard or RpcGuard(None, DrainState(), RequestJournal())
        self._health = HealthService(ready)
        service = build_service(kserve, guard, self._health, settings)
        self._transport = _transport(settings, service, guard.intake)
        self.port = self._transport.port

    async def start(self) -> None:
        await self._transport.start()
        self._health.start()

    def reload_certificates(self) -> None:
        """For new connections; does nothing without TLS."""
        self._transport.reload_certificates()

    async def drain(self) -> None:
        """Health says NOT_SERVING from now on, and clients are asked for other connections. Calls are served on."""
        self._health.close()
        self._transport.drain()

    async def leave(self) -> None:
        """The port closes, as that of gRPC's own servers does when they stop: clients that know several servers, and
        proxies, go to another one where they get no connection, and not where a call fails. Calls that clients make
        before they know are served. Returns when they know, or soon."""
        self._health.close()
        await self._transport.leave()

    def refuse(self) -> None:
        """No more calls. What runs may end."""
        self._health.close()
        self._transport.refuse()

    async def stop(self) -> None:
        """Ends what is still open after a short grace."""
        self._health.close()
        await self._transport.stop(_GRACE_SECONDS)


def _transport(settings: GrpcSettings, service: Service, intake: BodyIntake) -> Http2Transport | GrpcioTransport:
    if settings.transport == "grpcio":
        return GrpcioTransport(settings, service)
    return http2_transport(settings, service.service, intake)


def http2_transport(
    settings: GrpcSettings, find_handler: FindHandler, intake: BodyIntake, listener: socket | None = None
) -> Http2Transport:
    """`find_handler` gives what serves an RPC. `listener` listens already; None: it binds the settings' address."""
    return Http2Transport(
        settings.host,
        settings.port,
        settings.tls,
        settings.connections(),
        settings.limits(),
        find_handler,
        intake.bodies,
        intake.unread,
        listener,
    )


class GrpcioTransport:
    """The port as the gRPC library serves it, from `start` to `stop`. Made and used on the event loop."""

    def __init__(self, settings: GrpcSettings, service: Service) -> None:
        """Binds. Raises OSError, ConfigError."""
        tls = settings.tls
        self._certificates = GrpcCertificates(ReloadedCertificates(tls)) if tls.enabled else None
        self._following: asyncio.Task[None] | None = None
        self._server = grpc.aio.server(handlers=[service], options=settings.options())
        address = f"{url_host(settings.host)}:{settings.port}"
        try:
            if self._certificates is not None:
                credentials = self._certificates.credentials(mutual=tls.use_ssl_mutual)
                self.port: int = self._server.add_secure_port(address, credentials)
            else:
                self.port = self._server.add_insecure_port(address)
        except RuntimeError:  # gRPC keeps the reason to itself
            listener(settings.host, settings.port).close()
            raise OSError(f"gRPC cannot bind {address}") from None

    async def start(self) -> None:
        await self._server.start()
        if self._certificates is not None:
            self._following = asyncio.create_task(self._certificates.follow())

    def reload_certificates(self) -> None:
        if self._certificates is not None:
            self._certificates.reload()

    def drain(self) -> None:
        """The library tells its clients to leave when it stops, and not before."""

    async def leave(self) -> None:
        """It cannot close its port and serve what has come."""

    def refuse(self) -> None:
        """The library can do so only for good: the drain state refuses each call."""

    async def stop(self, grace: float) -> None:
        if self._following is not None:
            self._following.cancel()
        await self._server.stop(grace=grace)


class GrpcCertificates:
    """For the gRPC library, which asks for newer ones at each new connection."""

    def __init__(self, certificates: ReloadedCertificates) -> None:
        self._certificates = certificates
        self._newer: grpc.ServerCertificateConfiguration | None = None
        """What the library has not asked for yet."""

    def credentials(self, *, mutual: bool) -> grpc.ServerCredentials:
        """`mutual`: clients must have a certificate."""
        first = _configuration(self._certificates.current)
        return grpc.dynamic_ssl_server_credentials(first, self._fetch, require_client_authentication=mutual)

    def reload(self) -> None:
        self._certificates.reload()

    async def follow(self) -> None:
        await self._certificates.follow(self._use)

    async def _use(self, newer: Certificates) -> None:
        self._newer = _configuration(newer)

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """None: nothing is new. Called in the library's threads."""
        newer, self._newer = self._newer, None
        return newer


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(certificates.key, certificates.cert)], certificates.root)
