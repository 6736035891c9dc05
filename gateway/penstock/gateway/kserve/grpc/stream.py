"""ModelStreamInfer: many requests on one RPC. Responses of decoupled models are sent as they come, those of others in
the order of their requests, as in Triton."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager, nullcontext
from weakref import WeakValueDictionary

import grpc
from tritonclient.grpc.service_pb2 import ModelStreamInferResponse

from penstock.classic.base import AdmittedLater, InferModel, PushedStream, ResponseStream
from penstock.classic.messages import InferResponse
from penstock.engines.errors import DeadlineExceededError, InvalidRequestError
from penstock.gateway.errors import drop_traceback
from penstock.gateway.front.context import RequestContext
from penstock.gateway.front.record import REQUEST_ON_STREAM, RequestRecord
from penstock.gateway.grpc_transport.call import Call
from penstock.gateway.kserve.grpc.decode import Decoded
from penstock.gateway.kserve.grpc.encode import empty_final, stream_error
from penstock.gateway.kserve.grpc.infer import Inference
from penstock.gateway.kserve.grpc.parameters import FINAL
from penstock.gateway.kserve.grpc.pushed_responses import PushedResponses
from penstock.gateway.kserve.grpc.rpc import Guard, Message, Rpc, call_in_flight
from penstock.gateway.kserve.tracing import RequestTrace

_EOF = grpc.aio.EOF
_SEQUENCE = "sequence_id"
_TARGET = "penstock_target"
_STRICT = ("triton_grpc_error", "true")


class _Place:
    """Of one request in the order."""

    __slots__ = ("left", "of_sequence", "turn")

    def __init__(self) -> None:
        self.left = False
        self.of_sequence = False
        self.turn: asyncio.Future[None] | None = None


class StreamOrder:
    """Whose turn it is to be answered: the first request that has not left the order."""

    def __init__(self) -> None:
        self._places: dict[_Place, None] = {}
        self._crowded = False

    def enter(self) -> _Place:
        place = _Place()
        self._places[place] = None
        return place

    def leave(self, place: _Place) -> None:
        """It has been answered, or its responses come when they come."""
        if not place.left:
            self._remove(place)
            self._advance()

    def crowd(self, crowded: bool) -> None:
        """While the stream takes no more requests, none of a sequence is waited for: one that has not been taken may
        be what gives it its slot."""
        self._crowded = crowded
        self._advance()

    def is_of_sequence(self, place: _Place) -> None:
        place.of_sequence = True
        self._advance()

    async def turn(self, place: _Place) -> None:
        if not place.left and next(iter(self._places)) is not place:
            place.turn = asyncio.get_running_loop().create_future()
            await place.turn

    def _advance(self) -> None:
        while (first := next(iter(self._places), None)) is not None:
            if first.turn is not None and not first.turn.done():
                first.turn.set_result(None)
            if not (self._crowded and first.of_sequence):
                break
            self._remove(first)

    def _remove(self, place: _Place) -> None:
        place.left = True
        del self._places[place]


class InferStream:
    """One RPC. Each request has a task; it writes a response and takes the next one when that has been sent, so a slow
    reader holds back its own requests and nothing piles up here."""

    def __init__(self, inference: Inference, guard: Guard, rpc: Rpc, context: RequestContext, limit: int) -> None:
        self._inference = inference
        self._guard = guard
        self._rpc = rpc
        self._context = context
        self._strict = _STRICT in rpc.invocation_metadata()
        self._slots = asyncio.Semaphore(limit)
        self._writing = asyncio.Lock()
        self._order = StreamOrder()
        self._turns: WeakValueDictionary[tuple[str, bytes], asyncio.Lock] = WeakValueDictionary()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        """Until the caller has closed its side and everything is answered. Cancelling it cancels all requests.

        Raises the first error when the caller asked for that (`triton_grpc_error`), and DeadlineExceededError when the
        caller's deadline has ended a request.
        """
        reading = asyncio.create_task(self._read())
        try:
            await asyncio.wait((reading, self._failure), return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            reading.result()
        finally:
            for task in (reading, *self._tasks):
                task.cancel()
            await asyncio.gather(reading, *self._tasks, return_exceptions=True)
            if not self._failure.cancel() and not self._failure.cancelled():
                self._failure.exception()  # looked at, though another end came first

    async def _read(self) -> None:
        while True:
            if self._slots.locked():
                self._order.crowd(True)
                await self._slots.acquire()
                self._order.crowd(False)
            else:
                await self._slots.acquire()
            data = await self._rpc.read()
            if data is _EOF:
                break
            task = asyncio.create_task(self._serve_in_order(data, self._order.enter()))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slots.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    async def _serve_in_order(self, data: bytes, place: _Place) -> None:
        try:
            await self._serve(data, place)
        finally:
            self._order.leave(place)

    async def _serve(self, data: bytes, place: _Place) -> None:
        """One request."""
        try:
            message = self._inference.parse(data)
        except InvalidRequestError as error:
            await self._order.turn(place)
            await self._write(stream_error(error, ""))
            return
        context = self._context.next_request()
        context.record.bytes_in = len(data)
        context.record.route += REQUEST_ON_STREAM
        try:
            with self._guard.recorded(context), call_in_flight(self._guard.drain, context):
                await self._guard.take_in(context, data)
                await self._answer(data, message, context, place)
        except Exception as error:
            # before the first response could be asked for, or when the drain expired
            await self._order.turn(place)
            await self._write(stream_error(error, message.id))
            drop_traceback(error)

    async def _answer(self, data: bytes, message: Message, context: RequestContext, place: _Place) -> None:
        inference = self._inference
        if _SEQUENCE in message.parameters:
            self._order.is_of_sequence(place)
        async with self._turn(message):
            model = await inference.found_model(message, context)
            if model.signature.decoupled:
                self._order.leave(place)
            decoded = await inference.decode(data, message, model, self._rpc, context)
            model = inference.model_for(message, decoded)
            trace = inference.trace(model, decoded)
            try:
                responses = model.stream(decoded.request)
            except Exception:
                _end(trace)
                raise
        try:
            if isinstance(responses, AdmittedLater):
                await responses.admitted()
            await self._forward(model, decoded, responses, trace, context.record, place)
        except asyncio.CancelledError:
            if not decoded.ended:  # else the end is on its way, and the drain must not tell another one
                raise
        finally:
            responses.close()
            _end(trace)

    def _turn(self, message: Message) -> AbstractAsyncContextManager[object]:
        """What a request of a sequence holds until the model has it, so that none overtakes a larger one before it."""
        if _SEQUENCE not in message.parameters:
            return nullcontext()
        key = message.model_name, message.parameters[_SEQUENCE].SerializeToString()
        return self._turns.setdefault(key, asyncio.Lock())

    async def _forward(
        self,
        model: InferModel,
        decoded: Decoded,
        responses: ResponseStream,
        trace: RequestTrace | None,
        record: RequestRecord,
        place: _Place,
    ) -> None:
        encoder = self._inference.encoder(model, decoded)

        def write(response: InferResponse) -> bool:
            if record.target or response.outputs is None or not self._inference.is_plain(decoded, response):
                return False
            answer = encoder.encode_for_stream(response.outputs, final=False)
            if not self._write_now(answer):
                return False
            record.bytes_out += len(answer)
            return True

        readable: ResponseStream | PushedResponses = responses
        if trace is None and isinstance(responses, PushedStream) and responses.pushes:
            readable = PushedResponses(responses, write)
        try:
            async for response in readable:
                decoded.ended = response.final
                if not place.left:
                    await self._order.turn(place)
                if response.error is not None:
                    record.failed(response.error)
                    await self._error(response.error, model, decoded, final=response.final)
                elif response.outputs is not None:
                    if trace is not None:
                        trace.outputs(response.outputs)
                    if not record.target and self._inference.is_plain(decoded, response):
                        answer = encoder.encode_for_stream(response.outputs, final=response.final)
                    else:
                        answer = await self._encode(model, decoded, response, record.target)
                    record.bytes_out += len(answer)
                    await self._write(answer)
                if response.final:
                    if decoded.empty_final and response.outputs is None and response.error is None:
                        await self._write(empty_final(decoded.request.id, model.name))
                    break
        except Exception as error:
            record.failed(error)
            await self._order.turn(place)
            await self._error(error, model, decoded, final=True)

    async def _error(self, error: Exception, model: InferModel, decoded: Decoded, *, final: bool) -> None:
        if not self._strict:
            await self._write(stream_error(error, decoded.request.id, model.name, final))
        if self._strict or _ended_by_deadline(error, decoded):
            self._fail(error)

    async def _encode(self, model: InferModel, decoded: Decoded, response: InferResponse, target: str) -> bytes:
        message = ModelStreamInferResponse()
        part = message.infer_response
        part.parameters[FINAL].bool_param = response.final
        if target:  # a stream has no trailing metadata for each of its requests
            part.parameters[_TARGET].string_param = target
        return await self._inference.encode(message, part, model, decoded, response)

    def _write_now(self, data: bytes) -> bool:
        """False: it has to wait, for whatever reason."""
        rpc = self._rpc
        if not isinstance(rpc, Call) or self._writing.locked() or self._failure.done():
            return False
        return rpc.write_now(data)

    async def _write(self, data: bytes) -> None:
        async with self._writing:
            if not self._failure.done():  # the first error is the last a strict caller gets
                await self._rpc.write(data)


def _end(trace: RequestTrace | None) -> None:
    if trace is not None:
        trace.mark_now("REQUEST_END")
        trace.finish()


def _ended_by_deadline(error: Exception, decoded: Decoded) -> bool:
    """By the RPC's: the server's own time for a request ends no other request on the stream."""
    deadline = decoded.request.deadline
    return isinstance(error, DeadlineExceededError) and deadline is not None and time.monotonic() >= deadline
