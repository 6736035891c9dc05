"""What every RPC passes through: API keys, the drain, errors as statuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from penstock.engines.errors import InvalidRequestError, PenstockError
from penstock.gateway.front.auth import ApiKeys
from penstock.gateway.front.drain import DrainState
from penstock.gateway.kserve.grpc.status import shutting_down, status

logger = logging.getLogger("penstock.grpc")

Context = Any
"""grpc.aio.ServicerContext, which has no types."""
Message = Any
"""A protobuf message."""
UnaryHandler = Callable[[bytes, Context, str], Awaitable[bytes]]
"""Request, context and tenant to response. Raises PenstockError, DecodeError."""


class InFlight:
    """`with InFlight(drain):` counts work of the current task. When the drain expires, the task is cancelled and
    NotReadyError comes out of the block."""

    __slots__ = ("_drain", "_error", "_task")

    def __init__(self, drain: DrainState) -> None:
        self._drain = drain
        self._error: Exception | None = None

    def __enter__(self) -> InFlight:
        """Raises NotReadyError while draining."""
        if self._drain.draining:
            raise shutting_down()
        self._task = asyncio.current_task()
        self._drain.admit(self)
        return self

    def interrupt(self, error: Exception) -> None:
        """Ends the block with this error at its next suspension."""
        if self._error is None and self._task is not None:
            self._error = error
            self._task.cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drain.release(self)
        if self._error is not None and self._task is not None:
            self._task.uncancel()
            if isinstance(error, asyncio.CancelledError):
                raise self._error from None


class Guard:
    """Makes gRPC handlers of functions that raise our errors. Messages are bytes here."""

    def __init__(self, keys: ApiKeys | None, drain: DrainState) -> None:
        """Without `keys` everybody is let in."""
        self._keys = keys
        self.drain = drain

    def tenant(self, context: Context) -> str:
        """Raises AuthenticationError, InvalidRequestError."""
        if self._keys is None:
            return ""
        given = [value for key, value in context.invocation_metadata() if key == "authorization"] or [""]
        if len(given) > 1:
            raise InvalidRequestError("Authorization is given more than once.")
        return self._keys.tenant(given[0].encode() if isinstance(given[0], str) else given[0])

    def unary(self, handler: UnaryHandler) -> grpc.RpcMethodHandler:
        """Refused while draining."""
        drain = self.drain

        async def call(data: bytes, context: Context) -> bytes:
            try:
                with InFlight(drain):
                    return await handler(data, context, self.tenant(context))
            except Exception as error:
                failure = error
            return await abort(context, failure)

        return grpc.unary_unary_rpc_method_handler(call)

    def open(self, request: Any, handler: Callable[[Message], Message]) -> grpc.RpcMethodHandler:
        """For probes: without a key, and while draining, too."""

        async def call(data: bytes, context: Context) -> bytes:
            try:
                return bytes(handler(request.FromString(data)).SerializeToString())
            except Exception as error:
                failure = error
            return await abort(context, failure)

        return grpc.unary_unary_rpc_method_handler(call)

    def stream(self, handler: Callable[[Context, str], Awaitable[None]]) -> grpc.RpcMethodHandler:
        """The handler reads and writes bytes on the context. New streams are refused while draining; what runs on a
        stream, it counts itself."""

        async def call(_: object, context: Context) -> None:
            try:
                if self.drain.draining:
                    raise shutting_down()
                await handler(context, self.tenant(context))
            except Exception as error:
                await abort(context, error)

        return grpc.stream_stream_rpc_method_handler(call)


async def abort(context: Context, error: Exception) -> bytes:
    """Ends the RPC with the error's status, unless its caller or deadline has ended it at this very moment: raises what
    the gRPC library takes for that."""
    if isinstance(error, DecodeError):
        error = InvalidRequestError("the request message cannot be decoded")
    if not isinstance(error, PenstockError):
        logger.error("an RPC failed", exc_info=error)
    code, details = status(error)
    try:
        await context.abort(code, details)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
    raise AssertionError("abort returned")
