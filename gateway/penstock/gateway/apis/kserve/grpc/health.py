"""The standard health service, grpc.health.v1: Check and Watch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2

from penstock.gateway.apis.kserve.grpc.rpc import Message, Rpc

_POLL_SECONDS = 0.5
"""How often readiness is looked at for watchers. It depends on time (an engine grows silent), so nothing could announce
it."""

CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"


class HealthService:
    """Whatever service is asked for, the answer is about the whole server, as in Triton."""

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready
        self._changed = asyncio.Event()
        self._last = False
        self._poll: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def serving(self) -> bool:
        return not self._closed and self._ready()

    def start(self) -> None:
        self._poll = asyncio.create_task(self._follow())

    def close(self) -> None:
        """NOT_SERVING from now on, to those who watch, too."""
        self._closed = True
        if self._poll is not None:
            self._poll.cancel()
        self._look()

    def check(self, request: Message) -> Message:
        return _response(self.serving)

    async def watch(self, _: object, rpc: Rpc) -> None:
        """The status now, and whenever it is another one."""
        last: bool | None = None
        while True:
            self._look()  # so that whatever changes after this is noticed as a change
            changed, serving = self._changed, self._last
            if serving is not last:
                await rpc.write(_response(serving).SerializeToString())
                last = serving
            await changed.wait()

    def watch_handler(self) -> grpc.RpcMethodHandler:
        return grpc.unary_stream_rpc_method_handler(self.watch)

    async def _follow(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(_POLL_SECONDS)

    def _look(self) -> None:
        if self.serving is not self._last:
            self._last = self.serving
            self._changed.set()
            self._changed = asyncio.Event()


def _response(serving: bool) -> Message:
    status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    return health_pb2.HealthCheckResponse(status=status)
