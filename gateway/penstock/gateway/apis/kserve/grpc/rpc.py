"""The guard that every RPC passes: API keys and roles, the record, the drain, errors as statuses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
from google.protobuf.message import DecodeError

from penstock.engines.errors import InvalidRequestError, NotReadyError, PenstockError
from penstock.gateway.apis.kserve.errors import kserve_grpc_status
from penstock.gateway.errors import drop_traceback, public_message
from penstock.gateway.requests.access import PROBE, Access, ApiGroup, ApiKeys, Restrictions, check_restriction
from penstock.gateway.requests.call import DrainState, RequestJournal, ServedCall
from penstock.gateway.requests.context import Principal, RequestContext, read_context
from penstock.gateway.requests.intake import SMALL_BODY, BodyIntake
from penstock.gateway.requests.load_report import FORMAT_HEADER, LoadReporter

logger = logging.getLogger("penstock.grpc")

Message = Any
"""A protobuf message."""
Metadata = Iterable[tuple[str, str | bytes]]


class Rpc(Protocol):
    """One RPC, as its handler sees it: what both transports give. Messages are bytes."""

    def invocation_metadata(self) -> Metadata: ...
    def time_remaining(self) -> float | None:
        """Seconds; None: the caller has set no deadline."""

    def set_trailing_metadata(self, metadata: Any) -> None:
        """A tuple of pairs, which the end of the RPC tells."""

    async def read(self) -> Any:
        """The next message, or `grpc.aio.EOF`."""

    async def write(self, data: bytes) -> None:
        """Returns when more can be written."""

    async def abort(self, code: grpc.StatusCode, details: str) -> Any:
        """Ends the RPC with this status. Always raises."""


UnaryHandler = Callable[[bytes, Rpc, RequestContext], Awaitable[bytes]]
"""Request to response. Raises PenstockError, DecodeError."""
StreamHandler = Callable[[Rpc, RequestContext], Awaitable[None]]
"""Reads and writes bytes on the RPC. Raises PenstockError."""


@dataclass(frozen=True, slots=True)
class Method:
    access: Access
    handler: Callable[[RequestContext], grpc.RpcMethodHandler]
    """For one RPC, which has been let in."""


class RpcGuard:
    """Lets RPCs in, and makes gRPC methods of functions that raise our errors. Messages are bytes here."""

    def __init__(
        self,
        keys: ApiKeys | None,
        drain: DrainState,
        journal: RequestJournal,
        restrictions: Restrictions | None = None,
        intake: BodyIntake | None = None,
        load: LoadReporter | None = None,
    ) -> None:
        """Without `keys` everybody is let in; without `load` balancers are told nothing of the server's load."""
        self._load = load
        self.intake = intake or BodyIntake()
        self._keys = keys or ApiKeys()
        self._restrictions = restrictions or {}
        self.journal = journal
        self.drain = drain

    def handler(self, path: str, method: Method | None, metadata: Metadata) -> grpc.RpcMethodHandler | None:
        """What serves an RPC whose headers have come, and no message yet. None where there is no such method, of which
        nobody is told without a key."""
        pairs = [(key.encode(), _bytes(value)) for key, value in metadata]
        headers = dict(reversed(pairs))
        context = read_context(headers)
        context.record.protocol = "grpc"
        if method is not None:
            context.record.route = path
        try:
            if method is None or method.access.role is not None:
                context.principal = self._principal(pairs)
            if method is not None:
                check_restriction(self._restrictions, method.access.group, headers, "protocol")
                if method.access.role is not None:
                    context.principal.require(method.access.role)
        except Exception as error:
            return self._refusal(context, error)
        return None if method is None else method.handler(context)

    def _principal(self, metadata: list[tuple[bytes, bytes]]) -> Principal:
        """Raises AuthenticationError, InvalidRequestError."""
        headers = [value for key, value in metadata if key == b"authorization"]
        if len(headers) > 1 and self._keys.needed:
            raise InvalidRequestError("Authorization is given more than once.")
        return self._keys.principal(headers[0] if headers else None)

    def _refusal(self, context: RequestContext, error: Exception) -> grpc.RpcMethodHandler:
        """Ends the RPC at once. Only handlers of streams are called before a message has been received, and callers of
        any kind understand their answer."""

        async def call(_: object, rpc: Rpc) -> None:
            _name(rpc, context)
            try:
                with self.recorded(context):
                    raise error
            except Exception as failure:
                await abort(rpc, failure)

        return grpc.stream_stream_rpc_method_handler(call)

    async def take_in(self, context: RequestContext, data: bytes) -> None:
        """A request for inference, whose message is there. Raises OverloadedError, RateLimitedError."""
        self.hold(context, data)
        context.count()

    def hold(self, context: RequestContext, data: bytes) -> None:
        """Its message stays in memory until its end. Raises OverloadedError."""
        self.intake.lag.check()
        size = len(data)  # small ones count, too: a connection may send thousands at a time
        context.hold_body(self.intake.bodies, size, small=size <= SMALL_BODY)

    def recorded(self, context: RequestContext) -> Recorded:
        return Recorded(self.journal, context)

    def unary(self, access: Access, handler: UnaryHandler) -> Method:
        """Refused while draining."""

        infers = access.group is ApiGroup.INFERENCE

        def of(context: RequestContext) -> grpc.RpcMethodHandler:
            record = context.record

            async def call(data: bytes, rpc: Rpc) -> bytes:
                record.bytes_in = len(data)
                _name(rpc, context)
                try:
                    with self.recorded(context), call_in_flight(self.drain, context):
                        if infers:
                            await self.take_in(context, data)
                        answer = await handler(data, rpc, _with_deadline(context, rpc))
                        record.bytes_out = len(answer)
                        self._tell_end(rpc, context, infers=infers)
                        return answer
                except Exception as error:
                    failure = error
                self._tell_end(rpc, context, infers=infers)
                return await abort(rpc, failure)

            return _Unary(call)

        return Method(access, of)

    def _tell_end(self, rpc: Rpc, context: RequestContext, *, infers: bool) -> None:
        """What is known of the answer only now: which target has given it, and the server's load."""
        load = self._load.grpc_metadata(context.headers.get(FORMAT_HEADER)) if infers and self._load is not None else ()
        if load or context.record.target:
            _name(rpc, context, load)

    def open(self, request: Any, handler: Callable[[Message], Message]) -> Method:
        """For probes: without a key, and while draining, too."""

        async def call(data: bytes, rpc: Rpc) -> bytes:
            try:
                return bytes(handler(request.FromString(data)).SerializeToString())
            except Exception as error:
                failure = error
            return await abort(rpc, failure)

        method = grpc.unary_unary_rpc_method_handler(call)
        return Method(PROBE, lambda _: method)

    def stream(self, access: Access, handler: StreamHandler) -> Method:
        """New streams are refused while draining; what runs on a stream, it counts itself, for its key, too."""

        infers = access.group is ApiGroup.INFERENCE

        def of(context: RequestContext) -> grpc.RpcMethodHandler:
            async def call(_: object, rpc: Rpc) -> None:
                _name(rpc, context)
                try:
                    with self.recorded(context):
                        if self.drain.draining:
                            raise shutting_down()
                        await handler(rpc, _with_deadline(context, rpc))
                        self._tell_end(rpc, context, infers=infers)
                except Exception as error:
                    self._tell_end(rpc, context, infers=infers)
                    await abort(rpc, error)

            return grpc.stream_stream_rpc_method_handler(call)

        return Method(access, of)


class Recorded:
    """A request's record ends with this block, and says by which gRPC status."""

    __slots__ = ("_context", "_journal")

    def __init__(self, journal: RequestJournal, context: RequestContext) -> None:
        self._journal = journal
        self._context = context

    def __enter__(self) -> None:
        self._journal.begin(self._context)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        record = self._context.record
        if error is None:
            record.status = "OK"
        elif isinstance(error, asyncio.CancelledError):
            record.cancelled()
        elif isinstance(error, Exception):
            record.status = status(error)[0].name
            record.failed(error)
        self._journal.end(self._context)


class _Unary(grpc.RpcMethodHandler):  # type: ignore[misc]
    """One is made for each RPC: the library's function for that costs ten times as much."""

    __slots__ = ("unary_unary",)

    request_streaming = response_streaming = False
    request_deserializer = response_serializer = None

    def __init__(self, call: Callable[[bytes, Rpc], Awaitable[bytes]]) -> None:
        self.unary_unary = call


def call_in_flight(drain: DrainState, context: RequestContext) -> ServedCall:
    """Raises NotReadyError in Triton's words while draining. The gRPC library cancels the task of an RPC whose client
    has left."""
    if drain.draining:
        raise shutting_down()
    return ServedCall(drain, context)


def _name(rpc: Rpc, context: RequestContext, load: tuple[tuple[str, str | bytes], ...] = ()) -> None:
    """The RPC's end tells what an HTTP answer's headers do: its id, which target has answered, which fields were not
    used, and the load."""
    record = context.record
    pairs: tuple[tuple[str, str], ...] = (("x-request-id", context.id),)
    if record.target:
        pairs = (*pairs, ("x-penstock-target", record.target_told))
    if record.ignored:
        pairs = (*pairs, ("x-penstock-ignored", record.ignored_told))
    rpc.set_trailing_metadata((*pairs, *load))


def _with_deadline(context: RequestContext, rpc: Rpc) -> RequestContext:
    remaining = rpc.time_remaining()
    if remaining is not None:
        context.limit(time.monotonic() + remaining - context.arrival)
    return context


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
    drop_traceback(error)
    try:
        await rpc.abort(code, details)
    except grpc.aio.InternalError:
        raise asyncio.CancelledError from None
    raise AssertionError("abort returned")


_CODES = {code.name: code for code in grpc.StatusCode}


def status(error: Exception) -> tuple[grpc.StatusCode, str]:
    """Code and details; the latter hold nothing of exceptions outside the tree of errors."""
    return _CODES[kserve_grpc_status(error)], public_message(error)


def shutting_down() -> NotReadyError:
    return NotReadyError("GRPC server is shutting down and has stopped accepting new requests.")
