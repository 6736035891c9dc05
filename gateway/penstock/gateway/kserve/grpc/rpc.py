"""What every RPC passes through: API keys, the drain, errors as statuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from penstock.engines.errors import InvalidRequestError, PenstockError
from penstock.gateway.front.auth import ApiKeys
from penstock.gateway.front.call import Call
from penstock.gateway.front.context import ANYONE, RequestContext, read_context
from penstock.gateway.front.drain import DrainState
from penstock.gateway.kserve.grpc.status import shutting_down, status

logger = logging.getLogger("penstock.grpc")

Rpc = Any
"""grpc.aio.ServicerContext, which has no types."""
Message = Any
"""A protobuf message."""
UnaryHandler = Callable[[bytes, Rpc, RequestContext], Awaitable[bytes]]
"""Request to response. Raises PenstockError, DecodeError."""
StreamHandler = Callable[[Rpc, RequestContext], Awaitable[None]]
"""Reads and writes bytes on the RPC. Raises PenstockError."""


class Guard:
    """Makes gRPC handlers of functions that raise our errors. Messages are bytes here."""

    def __init__(self, keys: ApiKeys | None, drain: DrainState) -> None:
        """Without `keys` everybody is let in."""
        self._keys = keys
        self.drain = drain

    def request_context(self, rpc: Rpc) -> RequestContext:
        """Raises AuthenticationError, InvalidRequestError."""
        metadata = [(key, _bytes(value)) for key, value in rpc.invocation_metadata()]
        if self._keys is None:
            principal = ANYONE
        else:
            given = [value for key, value in metadata if key == "authorization"]
            if len(given) > 1:
                raise InvalidRequestError("Authorization is given more than once.")
            principal = self._keys.principal(given[0] if given else None)
        context = read_context({key.encode(): value for key, value in reversed(metadata)})
        context.principal = principal
        remaining = rpc.time_remaining()
        if remaining is not None:
            context.limit(remaining)
        return context

    def unary(self, handler: UnaryHandler) -> grpc.RpcMethodHandler:
        """Refused while draining."""

        async def call(data: bytes, rpc: Rpc) -> bytes:
            try:
                with call_in_flight(self.drain):
                    return await handler(data, rpc, self.request_context(rpc))
            except Exception as error:
                failure = error
            return await abort(rpc, failure)

        return grpc.unary_unary_rpc_method_handler(call)

    def open(self, request: Any, handler: Callable[[Message], Message]) -> grpc.RpcMethodHandler:
        """For probes: without a key, and while draining, too."""

        async def call(data: bytes, rpc: Rpc) -> bytes:
            try:
                return bytes(handler(request.FromString(data)).SerializeToString())
            except Exception as error:
                failure = error
            return await abort(rpc, failure)

        return grpc.unary_unary_rpc_method_handler(call)

    def stream(self, handler: StreamHandler) -> grpc.RpcMethodHandler:
        """New streams are refused while draining; what runs on a stream, it counts itself."""

        async def call(_: object, rpc: Rpc) -> None:
            try:
                if self.drain.draining:
                    raise shutting_down()
                await handler(rpc, self.request_context(rpc))
            except Exception as error:
                await abort(rpc, error)

        return grpc.stream_stream_rpc_method_handler(call)


def call_in_flight(drain: DrainState) -> Call:
    """Raises NotReadyError in Triton's words while draining. The gRPC library cancels the task of an RPC whose client
    has left."""
    if drain.draining:
        raise shutting_down()
    return Call(drain)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


async def abort(rpc: Rpc, error: Exception) -> bytes:
    """Ends the RPC with the error's status, unless its caller or deadline has ended it at this very moment: raises what
    the gRPC library takes for that."""
    if isinstance(error, DecodeError):
        error = InvalidRequestError("the request message cannot be decoded")
    if not isinstance(error, PenstockError):
        logger.error("an RPC failed", exc_info=error)
    code, details = status(error)
    try:
        await rpc.abort(code, details)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
    raise AssertionError("abort returned")
