"""Certificates for the gRPC library, which asks for newer ones at each new connection."""

from __future__ import annotations

import grpc

from penstock.gateway.front.tls import Certificates, ReloadedCertificates


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
