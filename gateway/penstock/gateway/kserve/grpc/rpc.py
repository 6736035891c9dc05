"""What every RPC passes through: API keys, the drain, errors as statuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from penstock.engines.errors import InvalidRequestError, PenstockError
from penstock.gateway.front.auth import ApiKeys
from penstock.gateway.front.call import Call
from penstock.gateway.front.context import RequestContext, read_context
from penstock.gateway.front.drain import DrainState
from penstock.gateway.front.journal import RequestJournal
from penstock.gateway.front.record import RequestRecord
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

    def __init__(self, keys: ApiKeys | None, drain: DrainState, journal: RequestJournal) -> None:
        """Without `keys` everybody is let in."""
        self.journal = journal
        self._keys = keys
        self.drain = drain

    def _context(self, rpc: Rpc, method: str) -> RequestContext:
        metadata = {key.encode(): _bytes(value) for key, value in reversed(rpc.invocation_metadata())}
        context = read_context(metadata)
        context.record.protocol, context.record.route = "grpc", method
        remaining = rpc.time_remaining()
        if remaining is not None:
            context.limit(remaining)
        return context

    def _admit(self, rpc: Rpc, context: RequestContext) -> None:
        """Raises AuthenticationError, InvalidRequestError."""
        if self._keys is None:
            return
        given = [_bytes(value) for key, value in rpc.invocation_metadata() if key == "authorization"]
        if len(given) > 1:
            raise InvalidRequestError("Authorization is given more than once.")
        context.principal = self._keys.principal(given[0] if given else None)

    @contextmanager
    def recorded(self, context: RequestContext) -> Iterator[None]:
        """Its record ends with this block."""
        self.journal.begin(context)
        try:
            yield
        except asyncio.CancelledError:
            context.record.cancelled()
            raise
        except Exception as error:
            context.record.failed(error)
            raise
        finally:
            self.journal.end(context)

    def unary(self, method: str, handler: UnaryHandler) -> grpc.RpcMethodHandler:
        """Refused while draining."""

        async def call(data: bytes, rpc: Rpc) -> bytes:
            context = self._context(rpc, method)
            record = context.record
            record.bytes_in = len(data)
            try:
                with self.recorded(context), answered(record), call_in_flight(self.drain, context):
                    self._admit(rpc, context)
                    answer = await handler(data, rpc, context)
                    record.bytes_out = len(answer)
                    return answer
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

    def stream(self, method: str, handler: StreamHandler) -> grpc.RpcMethodHandler:
        """New streams are refused while draining; what runs on a stream, it counts itself."""

        async def call(_: object, rpc: Rpc) -> None:
            context = self._context(rpc, method)
            try:
                with self.recorded(context), answered(context.record):
                    if self.drain.draining:
                        raise shutting_down()
                    self._admit(rpc, context)
                    await handler(rpc, context)
            except Exception as error:
                await abort(rpc, error)

        return grpc.stream_stream_rpc_method_handler(call)


@contextmanager
def answered(record: RequestRecord) -> Iterator[None]:
    """Notes the gRPC status by which this block ends."""
    try:
        yield
        record.status = "OK"
    except Exception as error:
        record.status = status(error)[0].name
        raise


def call_in_flight(drain: DrainState, context: RequestContext) -> Call:
    """Raises NotReadyError in Triton's words while draining. The gRPC library cancels the task of an RPC whose client
    has left."""
    if drain.draining:
        raise shutting_down()
    return Call(drain, context)


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
