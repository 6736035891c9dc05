"""The requests of a front that are in the model host: each ends exactly once, by an answer or with the host."""

from __future__ import annotations

import asyncio

from penstock.classic.messages import InferRequest, InferResponse
from penstock.engines.errors import EngineDeadError, NotReadyError, PenstockError
from penstock.gateway.kserve.tracing import RequestTrace
from penstock.gateway.model_host.connection import Connection, Packed, tensor_bytes
from penstock.gateway.model_host.error_fields import to_error
from penstock.gateway.model_host.messages import (
    SEQUENCE_END,
    SEQUENCE_START,
    STREAMED,
    TRACED,
    Cancel,
    DownMessage,
    Infer,
    Response,
    Taken,
)
from penstock.gateway.model_host.remote_stream import RemoteStream

_GONE = "the process that runs the models has ended"
_RETRY_AFTER = 1.0


class _Unary:
    """A request with one response."""

    __slots__ = ("future", "request", "version")

    def __init__(self, request: InferRequest, future: asyncio.Future[InferResponse], version: int) -> None:
        self.request = request
        self.future = future
        self.version = version


class RemoteCalls:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection: Connection[DownMessage]
        self._numbers = 0
        self._unary: dict[int, _Unary] = {}
        self._streams: dict[int, RemoteStream] = {}
        self._filling: set[asyncio.Task[None]] = set()
        self.closed = False

    def attach(self, connection: Connection[DownMessage]) -> None:
        """Once, before anything else."""
        self._connection = connection

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._unary) + len(self._streams)

    async def infer(self, request: InferRequest, name: str, asked: str, version: int) -> tuple[int, InferResponse]:
        """The version that has answered, and its response. Raises PenstockError."""
        packed = await self._filled(self._pack(request))
        number = self._next_number()
        call = self._unary[number] = _Unary(request, self._loop.create_future(), version)
        try:
            self._connection.send(_message(number, 0, name, asked, version, request, packed), packed)
            response = await call.future
        except BaseException as error:
            if self._unary.pop(number, None) is not None and isinstance(error, asyncio.CancelledError):
                self._connection.send(Cancel(number))
            raise
        return call.version, response

    def stream(self, request: InferRequest, name: str, asked: str, version: int) -> RemoteStream:
        """Raises PenstockError when the request cannot be sent; that the model refuses it comes as a response."""
        packed = self._pack(request)
        number = self._next_number()
        message = _message(number, STREAMED, name, asked, version, request, packed)
        if packed.copies.are_long and not request.correlation_id:  # those of a sequence stay in order
            task = self._loop.create_task(self._send_filled(number, message, packed))
            self._filling.add(task)
            task.add_done_callback(self._filling.discard)
        else:
            packed.copies.make()
            self._connection.send(message, packed)
        stream = self._streams[number] = RemoteStream(request, self._loop, number, self._taken, self._cancel)
        return stream

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _pack(self, request: InferRequest) -> Packed:
        """Raises NotReadyError, EngineError."""
        self._check_open()
        return self._connection.pack(request.inputs.values())

    def _check_open(self) -> None:
        if self.closed:
            raise NotReadyError(_GONE, retry_after=_RETRY_AFTER)

    async def _filled(self, packed: Packed) -> Packed:
        """Raises NotReadyError."""
        if packed.copies.are_long:
            await self._connection.fill(packed)
            self._check_open()
        else:
            packed.copies.make()
        return packed

    async def _send_filled(self, number: int, message: Infer, packed: Packed) -> None:
        try:
            await self._filled(packed)
            if number in self._streams:
                self._connection.send(message, packed)
            else:
                self._connection.release(packed)
        except PenstockError as error:
            if (stream := self._streams.pop(number, None)) is not None:
                stream.put(InferResponse(None, error=error), 0)

    def _taken(self, number: int, responses: int, size: int) -> None:
        self._connection.send(Taken(number, responses, size))

    def _cancel(self, number: int) -> None:
        if self._streams.pop(number, None) is not None:
            self._connection.send(Cancel(number))

    # What the host says

    def responded(self, message: Response, tail: memoryview) -> None:
        """Raises ValueError, LookupError and TypeError for a message that no host sends."""
        call, stream = self._unary.get(message.number), self._streams.get(message.number)
        if call is not None:
            del self._unary[message.number]
            self._end_unary(call, message, tail)
        elif stream is not None:
            if message.final:
                del self._streams[message.number]
                _note(stream.request, message)
            error = None if message.error is None else to_error(message.error)
            places = message.outputs
            outputs = None if places is None else self._connection.take(places, tail)
            response = InferResponse(outputs, message.parameters or {}, error, message.final)
            stream.put(response, tensor_bytes(places or ()), refused=message.refused)
        else:
            self._connection.drop(message.outputs or ())

    def _end_unary(self, call: _Unary, message: Response, tail: memoryview) -> None:
        if call.future.done():  # cancelled in this very turn of the loop
            self._connection.drop(message.outputs or ())
            return
        _note(call.request, message)
        if message.error is not None:
            call.future.set_exception(to_error(message.error))
            return
        call.version = message.version
        outputs = None if message.outputs is None else self._connection.take(message.outputs, tail)
        call.future.set_result(InferResponse(outputs, message.parameters or {}))

    def lost(self) -> None:
        """The host has gone: everything ends now."""
        self.closed = True
        calls, streams = list(self._unary.values()), list(self._streams.values())
        self._unary.clear()
        self._streams.clear()
        for call in calls:
            if not call.future.done():
                call.future.set_exception(_gone())
        for stream in streams:
            stream.put(InferResponse(None, error=_gone()), 0)


def _gone() -> EngineDeadError:
    """Each request gets its own: an exception that is raised in several places grows with every traceback."""
    return EngineDeadError(_GONE, retry_after=_RETRY_AFTER)


def _message(
    number: int, flags: int, name: str, asked: str, version: int, request: InferRequest, packed: Packed
) -> Infer:
    if request.sequence_start:
        flags |= SEQUENCE_START
    if request.sequence_end:
        flags |= SEQUENCE_END
    if request.trace is not None:
        flags |= TRACED
    caller = request.caller
    return Infer(
        number,
        name,
        asked,
        version,
        flags,
        packed.places,
        request.id,
        request.outputs,
        request.parameters,
        request.priority,
        request.timeout_us,
        request.deadline,
        request.correlation_id,
        request.tenant,
        None if caller is None else (caller.id, caller.traceparent),
    )


def _note(request: InferRequest, message: Response) -> None:
    """What the host has noted of the request."""
    if request.caller is not None:
        for model, started, ended in message.calls:
            request.caller.called(model, started, ended)
    if message.trace is not None and isinstance(request.trace, RequestTrace):
        request.trace.include(message.trace)
