"""ModelInfer and ModelStreamInfer: messages converted for the tensor plane, and its responses to messages.

A ModelStreamInfer carries many requests. Responses of decoupled models are sent as they come, those of others in the
order of their requests, as in Triton.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from weakref import WeakValueDictionary

import grpc
from tritonclient.grpc.service_pb2 import ModelInferResponse, ModelStreamInferResponse

from penstock.classic.base import AdmittedLater, InferModel, PushedStream, ResponseStream
from penstock.classic.messages import InferResponse
from penstock.engines.errors import DeadlineExceededError, UnsupportedError
from penstock.gateway.apis.kserve.context import KServe
from penstock.gateway.apis.kserve.grpc.messages import (
    Decoded,
    ResponseEncoder,
    ResponseForms,
    decode,
    empty_final,
    fill_response,
    parse,
    stream_error,
)
from penstock.gateway.apis.kserve.grpc.request_forms import KnownRequest, RequestForms
from penstock.gateway.apis.kserve.grpc.rpc import Message, Rpc, RpcGuard, call_in_flight
from penstock.gateway.apis.kserve.grpc.settings import GrpcSettings
from penstock.gateway.apis.kserve.parameters import FINAL, forwarded
from penstock.gateway.apis.kserve.tensor_plane import LONG_ANSWER, LONG_BODY, LONG_TEXT, Moments, TensorCall
from penstock.gateway.errors import drop_traceback
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.requests.record import REQUEST_ON_STREAM
from penstock.gateway.transports.grpc.call import GrpcCall
from penstock.gateway.transports.stream_driver import StreamDriver

_UNARY_MOMENTS = Moments(received="GRPC_WAITREAD_END", sending="GRPC_SEND_START")
_STREAM_MOMENTS = Moments(received="GRPC_WAITREAD_END")
_LONG_COPY = 4 << 20
"""Bytes of an answer whose numbers only have to be copied, from which that is left to a thread."""
_POINTER_BYTES = 8
_EOF = grpc.aio.EOF
_SEQUENCE = "sequence_id"
_TARGET = "penstock_target"
_STRICT = ("triton_grpc_error", "true")


class InferRpcs:
    """Both methods, on one tensor plane."""

    def __init__(self, kserve: KServe, guard: RpcGuard, settings: GrpcSettings) -> None:
        self.plane = kserve.plane
        self.guard = guard
        self.settings = settings
        self._requests = RequestForms()
        self._responses = ResponseForms()

    async def infer(self, data: bytes, rpc: Rpc, context: RequestContext) -> bytes:
        """ModelInfer. Cancelling it cancels the request. Raises PenstockError."""
        message = self.parse(data)
        model = await self.plane.find(message.model_name, message.model_version, context)
        if not model.takes_infer:
            raise UnsupportedError("ModelInfer RPC doesn't support models with decoupled transaction policy")
        decoded = await self.decode(data, message, model, rpc, context)
        call = self.plane.begin(model, message.model_version, decoded.request, context, _UNARY_MOMENTS)
        try:
            response = await call.infer()
            if is_plain(decoded, response):
                return self.encoder(call).encode(response.outputs or [])
            answer = ModelInferResponse()
            return await self.encode(answer, answer, call, decoded, response)
        finally:
            call.close()

    async def stream(self, rpc: Rpc, context: RequestContext) -> None:
        """ModelStreamInfer. Raises PenstockError."""
        await InferStream(self, rpc, context).run()

    def parse(self, data: bytes) -> Message | KnownRequest:
        """A ModelInferRequest. Raises InvalidRequestError."""
        return self._requests.known(data) or parse(data)

    async def decode(
        self, data: bytes, message: Message | KnownRequest, model: InferModel, rpc: Rpc, context: RequestContext
    ) -> Decoded:
        """`message` is what stands in `data`. Raises PenstockError for what cannot be asked like this."""
        if isinstance(message, KnownRequest):
            decoded = Decoded(message.request(), forms=None, empty_final=False)
        else:
            regions = self.plane.regions(context, context.hold_more)
            if self._takes_long(len(data), message):
                decoded = await self.plane.in_thread(len(data), decode, message, model, regions)
            else:
                decoded = decode(message, model, regions)
            if decoded.forms is None:
                self._requests.learn(data, message, decoded.request)
        if self.settings.header_forward_pattern is not None:
            texts = ((name, value) for name, value in rpc.invocation_metadata() if isinstance(value, str))
            decoded.request.parameters |= forwarded(texts, self.settings.header_forward_pattern)
        return decoded

    def _takes_long(self, size: int, message: Message) -> bool:
        if size >= LONG_BODY or (size >= LONG_TEXT and any(tensor.datatype == "BYTES" for tensor in message.inputs)):
            return True
        return self.plane.takes_memory and any(tensor.parameters for tensor in (*message.inputs, *message.outputs))

    def encoder(self, call: TensorCall) -> ResponseEncoder:
        """For the plain responses to this request."""
        return ResponseEncoder(self._responses, call.model.name, call.model.version, call.request.id)

    async def encode(
        self, whole: Message, part: Message, call: TensorCall, decoded: Decoded, response: InferResponse
    ) -> bytes:
        """Fills `part`, a ModelInferResponse, and gives `whole`, the message that it is or belongs to, as bytes."""
        model, outputs, forms = call.model, response.outputs or [], decoded.forms
        if forms is not None:
            outputs = await self.plane.in_forms(model, outputs, forms)
        part.model_name, part.model_version, part.id = model.name, str(model.version), call.request.id
        await self.plane.encode(outputs, fill_response, part, outputs, response.parameters, forms)
        return bytes(whole.SerializeToString())


def is_plain(decoded: Decoded, response: InferResponse) -> bool:
    """Nothing but outputs that are soon written."""
    if decoded.forms is not None or response.parameters:
        return False
    size = sum([tensor.array.nbytes for tensor in response.outputs or ()])
    if size < LONG_ANSWER * _POINTER_BYTES:  # elements of BYTES are pointers in the array
        return True
    return size < _LONG_COPY and all(tensor.datatype != "BYTES" for tensor in response.outputs or ())


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

    def __init__(self, rpcs: InferRpcs, rpc: Rpc, context: RequestContext) -> None:
        self.rpcs = rpcs
        self.rpc = rpc
        self.context = context
        self.strict = _STRICT in rpc.invocation_metadata()
        self.order = StreamOrder()
        self._slots = asyncio.Semaphore(rpcs.settings.max_requests_per_stream)
        self._writing = asyncio.Lock()
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
                self.order.crowd(True)
                await self._slots.acquire()
                self.order.crowd(False)
            else:
                await self._slots.acquire()
            data = await self.rpc.read()
            if data is _EOF:
                break
            task = asyncio.create_task(_StreamedRequest(self).serve(data))
            self._tasks.add(task)
            task.add_done_callback(self._ended)
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._slots.release()
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Ends the RPC with this status, unless another has come before."""
        if not self._failure.done():
            self._failure.set_exception(error)

    def turn_of_sequence(self, message: Message) -> AbstractAsyncContextManager[object]:
        """What a request of a sequence holds until the model has it, so that none overtakes a larger one before it."""
        if _SEQUENCE not in message.parameters:
            return nullcontext()
        key = message.model_name, message.parameters[_SEQUENCE].SerializeToString()
        return self._turns.setdefault(key, asyncio.Lock())

    def write_now(self, data: bytes) -> bool:
        """False: it has to wait, for whatever reason."""
        rpc = self.rpc
        if not isinstance(rpc, GrpcCall) or self._writing.locked() or self._failure.done():
            return False
        return rpc.write_now(data)

    async def write(self, data: bytes) -> None:
        async with self._writing:
            if not self._failure.done():  # the first error is the last a strict caller gets
                await self.rpc.write(data)


class ResponseDriver(StreamDriver[InferResponse]):
    """Of the responses of one request. Its task gets the first one, and those that `write` does not take."""

    def __init__(self, responses: ResponseStream, write: Callable[[InferResponse], bool]) -> None:
        """`write` returns False for a response that it leaves to the task."""
        self._responses = responses
        self._pushed = responses if isinstance(responses, PushedStream) and responses.pushes else None
        self._write = write
        self._begun = False

    def _listen(self) -> None:
        if self._pushed is not None and self._begun:
            self._pushed.listen(self)

    def _leave(self) -> None:
        if self._pushed is not None:
            self._pushed.listen(None)

    async def _pull(self) -> None:
        if self._pushed is not None and self._begun:
            await super()._pull()
        else:
            self.take(await anext(self._responses))

    def take(self, response: InferResponse) -> None:
        if self._turn.done():  # the task is being cancelled
            return
        begun, self._begun = self._begun, True
        try:
            if begun and self._write(response):
                return
        except Exception as error:
            self._raise(error)
        else:
            self._wake(response)


class _StreamedRequest:
    """One request of an RPC, from its message to its last response."""

    _call: TensorCall
    _decoded: Decoded
    _encoder: ResponseEncoder

    def __init__(self, stream: InferStream) -> None:
        self._stream = stream
        self._place = stream.order.enter()
        self._context = stream.context
        self._is_ending = False
        """The last response is being written."""

    async def serve(self, data: bytes) -> None:
        stream, guard, request_id = self._stream, self._stream.rpcs.guard, ""
        try:
            message = stream.rpcs.parse(data)
            request_id = message.id
            self._context = context = stream.context.next_request()
            context.record.bytes_in = len(data)
            context.record.route += REQUEST_ON_STREAM
            with guard.recorded(context), call_in_flight(guard.drain, context):
                await guard.take_in(context, data)
                await self._answer(data, message)
        except Exception as error:
            # before the first response could be asked for, or when the drain expired
            await stream.order.turn(self._place)
            await stream.write(stream_error(error, request_id))
            drop_traceback(error)
        finally:
            stream.order.leave(self._place)

    async def _answer(self, data: bytes, message: Message) -> None:
        stream, rpcs, context = self._stream, self._stream.rpcs, self._context
        if _SEQUENCE in message.parameters:
            stream.order.is_of_sequence(self._place)
        async with stream.turn_of_sequence(message):
            model = await rpcs.plane.find(message.model_name, message.model_version, context)
            if model.signature.decoupled:
                stream.order.leave(self._place)
            decoded = self._decoded = await rpcs.decode(data, message, model, stream.rpc, context)
            self._call = rpcs.plane.begin(model, message.model_version, decoded.request, context, _STREAM_MOMENTS)
            try:
                responses = self._call.stream()
            except Exception:
                self._call.close()
                raise
        self._encoder = rpcs.encoder(self._call)
        try:
            if isinstance(responses, AdmittedLater):
                await responses.admitted()
            await self._forward(responses)
        except asyncio.CancelledError:
            if not self._is_ending:  # else the end is on its way, and the drain must not tell another one
                raise
        finally:
            responses.close()
            self._call.close()

    async def _forward(self, responses: ResponseStream) -> None:
        stream, record = self._stream, self._context.record
        try:
            async for response in ResponseDriver(responses, self._push):
                self._is_ending = response.final
                if not self._place.left:
                    await stream.order.turn(self._place)
                if response.error is not None:
                    record.failed(response.error)
                    await self._error(response.error, final=response.final)
                elif response.outputs is not None:
                    answer = await self._encoded(response)
                    record.bytes_out += len(answer)
                    await stream.write(answer)
                elif response.final and self._decoded.empty_final:
                    await stream.write(empty_final(self._call.request.id, self._call.model.name))
                if response.final:
                    break
        except Exception as error:
            record.failed(error)
            await stream.order.turn(self._place)
            await self._error(error, final=True)

    def _push(self, response: InferResponse) -> bool:
        """Writes it, if that takes no waiting."""
        record = self._context.record
        if response.final or response.error is not None or response.outputs is None:
            return False
        if record.target or not is_plain(self._decoded, response):
            return False
        answer = self._encoder.encode_for_stream(response.outputs, final=False)
        if not self._stream.write_now(answer):
            return False
        record.bytes_out += len(answer)
        return True

    async def _encoded(self, response: InferResponse) -> bytes:
        target = self._context.record.target
        if not target and is_plain(self._decoded, response):
            return self._encoder.encode_for_stream(response.outputs or [], final=response.final)
        message = ModelStreamInferResponse()
        part = message.infer_response
        part.parameters[FINAL].bool_param = response.final
        if target:  # a stream has no trailing metadata for each of its requests
            part.parameters[_TARGET].string_param = target
        return await self._stream.rpcs.encode(message, part, self._call, self._decoded, response)

    async def _error(self, error: Exception, *, final: bool) -> None:
        stream, request = self._stream, self._call.request
        if not stream.strict:
            await stream.write(stream_error(error, request.id, self._call.model.name, final))
        if stream.strict or _ended_by_deadline(error, request.deadline):
            stream.fail(error)


def _ended_by_deadline(error: Exception, deadline: float | None) -> bool:
    """By the RPC's: the server's own time for a request ends no other request on the stream."""
    return isinstance(error, DeadlineExceededError) and deadline is not None and time.monotonic() >= deadline
