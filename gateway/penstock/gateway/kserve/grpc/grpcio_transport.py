"""The gRPC port as the gRPC library serves it, which asks for newer certificates at each new connection."""

from __future__ import annotations

import asyncio

import grpc

from penstock.gateway.front.acceptor import listener
from penstock.gateway.front.addresses import url_host
from penstock.gateway.front.tls import Certificates, ReloadedCertificates
from penstock.gateway.kserve.grpc.service import Service
from penstock.gateway.kserve.grpc.settings import GrpcSettings


class GrpcioTransport:
    """Serves from `start` to `stop`. Made and used on the event loop."""

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

    async def _use(self, found: Certificates) -> None:
        self._newer = _configuration(found)

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """None: nothing is new. Called in the library's threads."""
        newer, self._newer = self._newer, None
        return newer


def _configuration(found: Certificates) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(found.key, found.cert)], found.root)
