"""The requests of a front that are in the model host: each ends exactly once, by an answer or with the host."""

from __future__ import annotations

import asyncio
from asyncio import AbstractEventLoop, Future
from collections import deque
from collections.abc import Callable

from penstock.classic.base import AdmittedLater
from penstock.classic.messages import InferRequest, InferResponse
from penstock.engines.errors import EngineDeadError, NotReadyError, PenstockError
from penstock.gateway.apis.kserve.tracing import RequestTrace
from penstock.gateway.processes.model_host.connection import HostConnection, Packed, tensor_bytes
from penstock.gateway.processes.model_host.messages import (
    SEQUENCE_END,
    SEQUENCE_START,
    STREAMED,
    TRACED,
    Cancel,
    Infer,
    ReadWindow,
    Response,
    Taken,
    to_error,
)

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
    def __init__(self, connection: HostConnection) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._numbers = 0
        self._unary: dict[int, _Unary] = {}
        self._streams: dict[int, RemoteStream] = {}
        self._filling: set[asyncio.Task[None]] = set()
        self.closed = False

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._unary) + len(self._streams)

    async def infer(
        self, request: InferRequest, name: str, version_name: str, version: int
    ) -> tuple[int, InferResponse]:
        """The version that has answered, and its response. Raises PenstockError."""
        packed = await self._filled(self._pack(request))
        number = self._next_number()
        call = self._unary[number] = _Unary(request, self._loop.create_future(), version)
        try:
            self._connection.send(_message(number, 0, name, version_name, version, request, packed), packed)
            response = await call.future
        except BaseException as error:
            if self._unary.pop(number, None) is not None and isinstance(error, asyncio.CancelledError):
                self._connection.send(Cancel(number))
            raise
        return call.version, response

    def stream(self, request: InferRequest, name: str, version_name: str, version: int) -> RemoteStream:
        """Raises PenstockError when the request cannot be sent; that the model refuses it comes as a response."""
        packed = self._pack(request)
        number = self._next_number()
        message = _message(number, STREAMED, name, version_name, version, request, packed)
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
    number: int, flags: int, name: str, version_name: str, version: int, request: InferRequest, packed: Packed
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
        version_name,
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


class RemoteStream(AdmittedLater):
    """A `ResponseStream` with one reader. What lies unread in it is bounded: the host waits for `report`."""

    def __init__(
        self,
        request: InferRequest,
        loop: AbstractEventLoop,
        number: int,
        report: Callable[[int, int, int], None],
        cancel: Callable[[int], None],
    ) -> None:
        """`report` tells the host that so many responses and bytes have been read."""
        self.request = request
        self._loop = loop
        self._number = number
        self._report = report
        self._cancel = cancel
        self._window = ReadWindow()
        self._unread: deque[tuple[InferResponse, int]] = deque()
        self._reader: Future[None] | None = None
        self._ended = False
        self._refusal: PenstockError | None = None

    def put(self, response: InferResponse, size: int, refused: bool = False) -> None:
        """`size`: bytes of its tensors. `refused`: its error is why the request was never begun."""
        if self._ended:
            return
        self._refusal = response.error if refused else None
        self._ended = response.final
        self._unread.append((response, size))
        self._wake()

    def __aiter__(self) -> RemoteStream:
        return self

    async def __anext__(self) -> InferResponse:
        await self._something()
        if not self._unread:
            raise StopAsyncIteration
        return self._pop()

    async def admitted(self) -> None:
        await self._something()
        if self._refusal is not None:
            raise self._refusal

    async def _something(self) -> None:
        """Returns when there is a response, or will be none."""
        while not self._unread and not self._ended:
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None

    def ready(self) -> InferResponse | None:
        return self._pop() if self._unread else None

    def _pop(self) -> InferResponse:
        response, size = self._unread.popleft()
        if not self._ended:
            report = self._window.take(size)
            if report is not None:
                self._report(self._number, *report)
        return response

    def close(self) -> None:
        self._unread.clear()
        if not self._ended:
            self._ended = True
            self._cancel(self._number)
            self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)
