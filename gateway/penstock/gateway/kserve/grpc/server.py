"""The gRPC port of a server process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc

from penstock.gateway.front.access import Restrictions
from penstock.gateway.front.addresses import url_host
from penstock.gateway.front.auth import ApiKeys
from penstock.gateway.front.drain import DrainState
from penstock.gateway.front.intake import Intake
from penstock.gateway.front.journal import RequestJournal
from penstock.gateway.front.listening import listener
from penstock.gateway.front.tls import ReloadedCertificates
from penstock.gateway.kserve.context import KServe
from penstock.gateway.kserve.grpc.certificates import GrpcCertificates
from penstock.gateway.kserve.grpc.health import Health
from penstock.gateway.kserve.grpc.rpc import Guard
from penstock.gateway.kserve.grpc.service import build_service
from penstock.gateway.kserve.grpc.settings import GrpcSettings

_GRACE_SECONDS = 1.0


class GrpcServer:
    """Serves from `start` to `stop`. Made and used on the event loop."""

    def __init__(
        self,
        settings: GrpcSettings,
        kserve: KServe,
        ready: Callable[[], bool],
        drain: DrainState | None = None,
        keys: ApiKeys | None = None,
        journal: RequestJournal | None = None,
        restrictions: Restrictions | None = None,
        intake: Intake | None = None,
    ) -> None:
        """Binds. `ready` says whether the server as a whole is; without `keys` everybody is let in.

        Raises OSError when the address cannot be bound, ConfigError, with the flag to blame, when the TLS files are not
        usable.
        """
        tls = settings.tls
        self._certificates = GrpcCertificates(ReloadedCertificates(tls)) if tls.enabled else None
        self._following: asyncio.Task[None] | None = None
        self._health = Health(ready)
        guard = Guard(keys, drain or DrainState(), journal or RequestJournal(), restrictions, intake)
        service = build_service(kserve, guard, self._health, settings)
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
        self._health.start()
        if self._certificates is not None:
            self._following = asyncio.create_task(self._certificates.follow())

    def reload_certificates(self) -> None:
        """For new connections; does nothing without TLS."""
        if self._certificates is not None:
            self._certificates.reload()

    async def drain(self) -> None:
        """Health says NOT_SERVING from now on. What refuses new work is the drain state, which the caller begins."""
        self._health.close()

    async def stop(self) -> None:
        """Ends what is still open after a short grace."""
        self._health.close()
        if self._following is not None:
            self._following.cancel()
        await self._server.stop(grace=_GRACE_SECONDS)
