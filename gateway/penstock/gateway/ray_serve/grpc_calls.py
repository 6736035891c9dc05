"""KServe's gRPC service, as Ray Serve's proxies bring its calls: a message, or a stream of them, and a context.

Serve finds a deployment's method by the name of the RPC. The service behind is the one of the gRPC port, with its keys,
roles and limits. Messages are bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import grpc

from penstock.gateway.apis.kserve.grpc.rpc import Metadata, status
from penstock.gateway.apis.kserve.grpc.service import Service
from penstock.gateway.ray_serve.grpc_service import SERVICE
from penstock.gateway.ray_serve.replica_server import changes_one_replica, refusal

UNARY = tuple(method.name for method in SERVICE.methods if not method.client_streaming)
STREAMED = tuple(method.name for method in SERVICE.methods if method.client_streaming)


class RpcAborted(Exception):
    """An RPC has ended with a status, which its context has."""


class ServedBytes:
    """An answer that is encoded already, as Serve asks for it."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def SerializeToString(self) -> bytes:
        return self._data


class ServeRpc:
    """`Rpc` over Serve's context."""

    def __init__(self, context: Any, requests: AsyncIterator[bytes] | None = None) -> None:
        """`requests`: of a streamed call."""
        self._context = context
        self._requests = requests
        self.answers: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=1)
        """Of a streamed call; None is its end."""

    def invocation_metadata(self) -> Metadata:
        return [(key, value) for key, value in self._context.invocation_metadata()]

    def time_remaining(self) -> float | None:
        """Serve does not tell a deadline: it cancels the call."""
        return None

    def set_trailing_metadata(self, metadata: Any) -> None:
        self._context.set_trailing_metadata([*self._context.trailing_metadata(), *metadata])

    async def read(self) -> Any:
        if self._requests is None:
            return grpc.aio.EOF
        return await anext(self._requests, grpc.aio.EOF)

    async def write(self, data: bytes) -> None:
        await self.answers.put(data)

    async def abort(self, code: grpc.StatusCode, details: str) -> Any:
        self._context.set_code(code)
        self._context.set_details(details)
        raise RpcAborted(details)


async def call(service: Service, name: str, message: bytes, context: Any) -> ServedBytes:
    """One request, one answer. Raises Aborted."""
    rpc = ServeRpc(context)
    handler = await _handler(service, name, rpc)
    if handler.unary_unary is None:  # it is refused
        await handler.stream_stream(None, rpc)
    return ServedBytes(await handler.unary_unary(message, rpc))


async def stream(
    service: Service, name: str, messages: AsyncIterator[bytes], context: Any
) -> AsyncIterator[ServedBytes]:
    """Many requests and their answers. Raises Aborted."""
    rpc = ServeRpc(context, messages)
    handler = await _handler(service, name, rpc)

    async def serve() -> None:
        try:
            await handler.stream_stream(None, rpc)
        finally:
            await rpc.answers.put(None)

    serving = asyncio.create_task(serve())
    try:
        while (answer := await rpc.answers.get()) is not None:
            yield ServedBytes(answer)
        await serving
    finally:
        serving.cancel()


class _Details(NamedTuple):
    """As the gRPC library describes a call to its handlers."""

    method: str
    invocation_metadata: Metadata


async def _handler(service: Service, name: str, rpc: ServeRpc) -> Any:
    path = f"/{SERVICE.full_name}/{name}"
    method = service.methods.get(path)
    if method is not None and changes_one_replica(method.access):
        await rpc.abort(*status(refusal()))
    handler = service.service(_Details(path, rpc.invocation_metadata()))
    if handler is None:
        await rpc.abort(grpc.StatusCode.UNIMPLEMENTED, f"there is no method {name}")
    return handler
