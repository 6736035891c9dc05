"""The gRPC port of a server process."""

from __future__ import annotations

from collections.abc import Callable
from socket import socket

from penstock.gateway.front.drain import DrainState
from penstock.gateway.front.intake import Intake
from penstock.gateway.front.journal import RequestJournal
from penstock.gateway.grpc_transport.server import FindHandler, Http2Transport
from penstock.gateway.kserve.context import KServe
from penstock.gateway.kserve.grpc.grpcio_transport import GrpcioTransport
from penstock.gateway.kserve.grpc.health import Health
from penstock.gateway.kserve.grpc.rpc import Guard
from penstock.gateway.kserve.grpc.service import Service, build_service
from penstock.gateway.kserve.grpc.settings import GrpcSettings

_GRACE_SECONDS = 1.0


class GrpcServer:
    """Serves from `start` to `stop`. Made and used on the event loop."""

    def __init__(
        self,
        settings: GrpcSettings,
        kserve: KServe,
        ready: Callable[[], bool],
        guard: Guard | None = None,
    ) -> None:
        """Binds. `ready` says whether the server as a whole is; without `guard` everybody is let in.

        Raises OSError when the address cannot be bound, ConfigError, with the flag to blame, when the TLS files are not
        usable.
        """
        guard = guard or Guard(None, DrainState(), RequestJournal())
        self._health = Health(ready)
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


def _transport(settings: GrpcSettings, service: Service, intake: Intake) -> Http2Transport | GrpcioTransport:
    if settings.transport == "grpcio":
        return GrpcioTransport(settings, service)
    return http2_transport(settings, service.service, intake)


def http2_transport(
    settings: GrpcSettings, find_handler: FindHandler, intake: Intake, listener: socket | None = None
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
