"""The requests of one front in the host: each is a task, and each ends with one final response, unless the front has
cancelled it or gone."""

from __future__ import annotations

import asyncio
import time

from penstock.classic.base import InferModel, ResponseStream
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.tensors import Tensor
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.kserve.store import ModelStore
from penstock.gateway.processes.model_host.connection import HostConnection, tensor_bytes
from penstock.gateway.processes.model_host.messages import (
    SEQUENCE_END,
    SEQUENCE_START,
    STREAMED,
    TRACED,
    Infer,
    Place,
    Response,
    SendWindow,
    Taken,
    TraceFields,
    to_fields,
)

_MAX_CALLS = 128
"""Of other models that are told; there may be any number."""


class FrontCaller:
    """A `messages.Caller`."""

    __slots__ = ("calls", "id", "traceparent")

    def __init__(self, id: str, traceparent: str) -> None:
        self.id = id
        self.traceparent = traceparent
        self.calls: list[tuple[str, float, float]] = []

    def called(self, model: str, started: float, ended: float) -> None:
        if len(self.calls) < _MAX_CALLS:
            self.calls.append((model, started, ended))


class NotedTrace:
    """A `messages.Trace` whose notes go back with the final response: the front writes the trace. Safe to mark from any
    thread."""

    __slots__ = ("fields",)

    def __init__(self) -> None:
        self.fields = TraceFields([], [])

    def mark(self, event: str, ns: int) -> None:
        self.fields.marks.append((event, ns))

    def child(self, model: str, version: int) -> NotedTrace:
        trace = NotedTrace()
        trace.mark("REQUEST_START", time.monotonic_ns())
        self.fields.children.append((model, version, trace.fields))
        return trace

    def finish(self) -> None:
        """Nothing: the front finishes it."""


_LONG_TEXT = 1 << 16
"""Bytes of strings from which they are decoded in a thread."""


class HostedCalls:
    def __init__(self, models: ModelStore, connection: HostConnection) -> None:
        self._models = models
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._gates: dict[int, _Gate] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def infer(self, message: Infer, tail: memoryview) -> None:
        """Raises ValueError, LookupError and TypeError for a message that no front sends."""
        if message.number in self._tasks:
            raise ValueError("a front has used a request's number twice")
        inputs: list[Tensor] | asyncio.Future[list[Tensor]]
        self._connection.lend(message.inputs)
        if _has_long_text(message.inputs) and not message.correlation_id:  # those of a sequence stay in order
            inputs = self._loop.run_in_executor(None, self._connection.read, message.inputs, tail)
        else:
            inputs = self._connection.read(message.inputs, tail)
        serve = self._stream if message.flags & STREAMED else self._infer
        self._tasks[message.number] = self._loop.create_task(serve(message, inputs))

    def cancel(self, number: int) -> None:
        task = self._tasks.pop(number, None)
        if task is not None:
            task.cancel()

    def taken(self, report: Taken) -> None:
        gate = self._gates.get(report.number)
        if gate is not None:
            gate.taken(report.responses, report.size)

    def close(self) -> None:
        """The front has gone, and nobody waits any more."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()

    async def _infer(self, message: Infer, inputs: _Inputs) -> None:
        request = None
        try:
            request = await self._request(message, inputs)
            model = self._model(message, request)
            response = await model.infer(request)
            await self._respond(message.number, model, request, response, True)
        except Exception as error:
            self._fail(message, request, error)
        finally:
            self._tasks.pop(message.number, None)

    async def _stream(self, message: Infer, inputs: _Inputs) -> None:
        request = None
        gate = self._gates[message.number] = _Gate(self._loop)
        try:
            request = await self._request(message, inputs)
            model = self._model(message, request)
            responses = model.stream(request)
            gate.begun = True
            await self._forward(message.number, model, request, gate, responses)
        except Exception as error:
            self._fail(message, request, error, refused=not gate.begun)
        finally:
            del self._gates[message.number]
            self._tasks.pop(message.number, None)

    async def _forward(
        self, number: int, model: InferModel, request: InferRequest, gate: _Gate, responses: ResponseStream
    ) -> None:
        try:
            async for response in responses:
                await gate.opened()
                gate.sent(await self._respond(number, model, request, response, response.final))
                if response.final:
                    return
        finally:
            responses.close()
        await self._respond(number, model, request, InferResponse(None), True)

    async def _request(self, message: Infer, inputs: _Inputs) -> InferRequest:
        """Raises InvalidRequestError."""
        if not isinstance(inputs, list):
            inputs = await asyncio.shield(inputs)  # the thread ends in any case: then the tensors' memory is given back
        return _request(message, inputs)

    def _model(self, message: Infer, request: InferRequest) -> InferModel:
        """The one that serves now: since the front has chosen, a reload may have put another one in its place. Raises
        PenstockError."""
        return self._models.model(message.name, message.version_name, request)

    async def _respond(
        self, number: int, model: InferModel, request: InferRequest, response: InferResponse, final: bool
    ) -> int:
        """Returns the bytes of the response's tensors."""
        packed = None
        if response.outputs is not None and response.error is None:
            packed = self._connection.pack(response.outputs)
            if packed.copies.pending:
                await self._connection.fill(packed)
        error = None if response.error is None else to_fields(response.error)
        message = Response(
            number,
            final,
            None if packed is None else packed.places,
            response.parameters or None,
            error,
            model.version,
            *(_notes(request) if final else ([], None)),
        )
        self._connection.send(message, packed)
        return 0 if packed is None else tensor_bytes(packed.places)

    def _fail(self, message: Infer, request: InferRequest | None, error: Exception, refused: bool = False) -> None:
        calls, trace = ([], None) if request is None else _notes(request)
        fields = to_fields(error)
        self._connection.send(
            Response(message.number, True, None, None, fields, message.version, calls, trace, refused)
        )


_Inputs = list[Tensor] | asyncio.Future[list[Tensor]]


class _Gate:
    """Where a stream waits for its reader."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.begun = False
        """The model has not refused the request."""
        self._window = SendWindow()
        self._loop = loop
        self._waiting: asyncio.Future[None] | None = None

    async def opened(self) -> None:
        while not self._window.open:
            self._waiting = self._loop.create_future()
            await self._waiting

    def sent(self, size: int) -> None:
        self._window.sent(size)

    def taken(self, responses: int, size: int) -> None:
        self._window.taken(responses, size)
        if self._window.open and self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def _request(message: Infer, inputs: list[Tensor]) -> InferRequest:
    """Raises InvalidRequestError."""
    by_name = {tensor.name: tensor for tensor in inputs}
    if len(by_name) < len(inputs):
        raise InvalidRequestError("the request has several inputs of one name")
    return InferRequest(
        inputs=by_name,
        id=message.id,
        outputs=message.outputs,
        parameters=message.parameters,
        priority=message.priority,
        timeout_us=message.timeout_us,
        deadline=message.deadline,
        correlation_id=message.correlation_id,
        sequence_start=bool(message.flags & SEQUENCE_START),
        sequence_end=bool(message.flags & SEQUENCE_END),
        tenant=message.tenant,
        caller=None if message.caller is None else FrontCaller(*message.caller),
        trace=NotedTrace() if message.flags & TRACED else None,
    )


def _notes(request: InferRequest) -> tuple[list[tuple[str, float, float]], TraceFields | None]:
    """What the front is told at the request's end."""
    caller, trace = request.caller, request.trace
    return (
        caller.calls if isinstance(caller, FrontCaller) else [],
        trace.fields if isinstance(trace, NotedTrace) else None,
    )


def _has_long_text(places: list[Place]) -> bool:
    return any(place[1] == "BYTES" and place[4] >= _LONG_TEXT for place in places)
