"""The gRPC port of a server process."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from penstock.gateway.front.access import Restrictions
from penstock.gateway.front.addresses import url_host
from penstock.gateway.front.auth import ApiKeys
from penstock.gateway.front.drain import DrainState
from penstock.gateway.front.journal import RequestJournal
from penstock.gateway.front.listening import listener
from penstock.gateway.kserve.context import KServe
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
    ) -> None:
        """Binds. `ready` says whether the server as a whole is; without `keys` everybody is let in.

        Raises OSError when the address cannot be bound, ValueError, with the flag to blame, when the TLS files are not
        usable.
        """
        self._health = Health(ready)
        guard = Guard(keys, drain or DrainState(), journal or RequestJournal(), restrictions)
        service = build_service(kserve, guard, self._health, settings)
        self._server = grpc.aio.server(handlers=[service], options=settings.options())
        address = f"{url_host(settings.host)}:{settings.port}"
        try:
            if settings.tls.enabled:
                self.port: int = self._server.add_secure_port(address, settings.tls.credentials())
            else:
                self.port = self._server.add_insecure_port(address)
        except RuntimeError:  # gRPC keeps the reason to itself
            listener(settings.host, settings.port).close()
            if settings.tls.enabled:
                raise ValueError("grpc-server-cert: it cannot be used with grpc-server-key") from None
            raise OSError(f"gRPC cannot bind {address}") from None

    async def start(self) -> None:
        await self._server.start()
        self._health.start()

    async def drain(self) -> None:
        """Health says NOT_SERVING from now on. What refuses new work is the drain state, which the caller begins."""
        self._health.close()

    async def stop(self) -> None:
        """Ends what is still open after a short grace."""
        self._health.close()
        await self._server.stop(grace=_GRACE_SECONDS)
