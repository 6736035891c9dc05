"""ModelInfer, and what it shares with ModelStreamInfer."""

from __future__ import annotations

import re

from tritonclient.grpc.service_pb2 import ModelInferResponse

from penstock.classic.base import InferModel
from penstock.classic.messages import InferResponse
from penstock.classic.tensors import Tensor
from penstock.engines.errors import UnsupportedError
from penstock.gateway.front.context import RequestContext
from penstock.gateway.kserve.caller import set_caller
from penstock.gateway.kserve.classification import Labels
from penstock.gateway.kserve.context import KServe
from penstock.gateway.kserve.grpc.decode import Decoded, decode, parse
from penstock.gateway.kserve.grpc.encode import fill_response, with_classes
from penstock.gateway.kserve.grpc.request_forms import KnownRequest, RequestForms
from penstock.gateway.kserve.grpc.response_forms import ResponseEncoder, ResponseForms
from penstock.gateway.kserve.grpc.rpc import Message, Rpc
from penstock.gateway.kserve.headers import forwarded
from penstock.gateway.kserve.tracing import RequestTrace

_LONG_REQUEST = 1 << 20
_LONG_TEXT = 1 << 16
_LONG_ANSWER = 1 << 17
_LONG_COPY = 4 << 20
"""From so many bytes of a request, or of one with strings, and elements of an answer, coding them is left to a thread:
it would hold up all other requests. So is what may read or write shared memory. Where an answer's numbers only have to
be copied, there may be more of them: so many bytes."""
_POINTER_BYTES = 8


class Inference:
    """Turns messages into requests for models, and their responses into messages."""

    def __init__(self, kserve: KServe, header_pattern: re.Pattern[str] | None) -> None:
        """`header_pattern` says which metadata go to the model as parameters."""
        self._models = kserve.models
        self._on_demand = kserve.on_demand
        self._regions = kserve.shared_memory
        self._tracing = kserve.tracing
        self._tensors = kserve.pools.tensors
        self._pattern = header_pattern
        self._labels = Labels()
        self._requests = RequestForms()
        self._responses = ResponseForms()

    def parse(self, data: bytes) -> Message | KnownRequest:
        """A ModelInferRequest. Raises InvalidRequestError."""
        return self._requests.known(data) or parse(data)

    async def found_model(self, message: Message | KnownRequest, context: RequestContext) -> InferModel:
        """The model that serves the request, which is loaded for it if need be. Raises PenstockError."""
        if self._on_demand is not None:
            await self._on_demand.use(message.model_name, context, message.model_version)
        model = self.model(message)
        context.principal.require_model(model.name)  # errors of `decode` tell a model's inputs
        return model

    def model(self, message: Message) -> InferModel:
        """That serves now. Raises ModelNotFoundError, NotReadyError, InvalidRequestError."""
        return self._models.model(message.model_name, message.model_version)

    def model_for(self, message: Message, decoded: Decoded) -> InferModel:
        """The model that gets the request: a reload may have replaced it meanwhile. Raises as `model`."""
        return self._models.model(message.model_name, message.model_version, decoded.request)

    async def decode(
        self, data: bytes, message: Message | KnownRequest, model: InferModel, rpc: Rpc, context: RequestContext
    ) -> Decoded:
        """`message` is what stands in `data`. Raises PenstockError for what cannot be asked like this."""
        if isinstance(message, KnownRequest):
            decoded = Decoded(message.request(), options=None, empty_final=False)
        else:
            regions = self._regions.of(context.principal, context.hold_more, context)
            if self._takes_long(len(data), message):
                decoded = await self._tensors.run(len(data), decode, message, model, regions)
            else:
                decoded = decode(message, model, regions)
            if decoded.options is None:
                self._requests.learn(data, message, decoded.request)
        request = decoded.request
        set_caller(request, context, model.name)
        if self._pattern is not None:
            texts = ((name, value) for name, value in rpc.invocation_metadata() if isinstance(value, str))
            request.parameters |= forwarded(texts, self._pattern)
        return decoded

    def _takes_long(self, size: int, message: Message) -> bool:
        if size >= _LONG_REQUEST or (size >= _LONG_TEXT and any(each.datatype == "BYTES" for each in message.inputs)):
            return True
        return self._regions.allowed and any(each.parameters for each in (*message.inputs, *message.outputs))

    def trace(self, model: InferModel, decoded: Decoded) -> RequestTrace | None:
        """The trace of a request that is to be traced; it has begun."""
        trace = self._tracing.start(model.name, model.version, decoded.request.id)
        if trace is not None:
            trace.mark_now("GRPC_WAITREAD_END")
            trace.inputs(decoded.request)
            trace.mark_now("REQUEST_START")
        return trace

    async def infer(self, data: bytes, rpc: Rpc, context: RequestContext) -> bytes:
        """ModelInfer. Cancelling it cancels the request. Raises PenstockError."""
        message = self.parse(data)
        model = await self.found_model(message, context)
        if not model.takes_infer:
            raise UnsupportedError("ModelInfer RPC doesn't support models with decoupled transaction policy")
        decoded = await self.decode(data, message, model, rpc, context)
        model = self.model_for(message, decoded)
        trace = self.trace(model, decoded) if self._tracing.active else None
        try:
            response = await model.infer(decoded.request)
            if response.error is not None:
                raise response.error
            if trace is not None:
                trace.mark_now("REQUEST_END")
                trace.outputs(response.outputs or ())
                trace.mark_now("GRPC_SEND_START")
            if self.is_plain(decoded, response):
                return self.encoder(model, decoded).encode(response.outputs or [])
            answer = ModelInferResponse()
            return await self.encode(answer, answer, model, decoded, response)
        finally:
            if trace is not None:
                trace.finish()

    def encoder(self, model: InferModel, decoded: Decoded) -> ResponseEncoder:
        """For the plain responses to this request."""
        return ResponseEncoder(self._responses, model.name, model.version, decoded.request.id)

    @staticmethod
    def is_plain(decoded: Decoded, response: InferResponse) -> bool:
        """Nothing but outputs that are soon written."""
        if decoded.options is not None or response.parameters:
            return False
        size = sum([tensor.array.nbytes for tensor in response.outputs or ()])
        if size < _LONG_ANSWER * _POINTER_BYTES:  # elements of BYTES are pointers in the array
            return True
        return size < _LONG_COPY and all(tensor.datatype != "BYTES" for tensor in response.outputs or ())

    async def encode(
        self, whole: Message, part: Message, model: InferModel, decoded: Decoded, response: InferResponse
    ) -> bytes:
        """Fills `part`, a ModelInferResponse, and gives `whole`, the message that it is or belongs to, as bytes."""
        outputs = response.outputs or []
        options = decoded.options
        if options is not None:
            outputs = await with_classes(outputs, model, options, self._labels, self._tensors)
        part.model_name, part.model_version, part.id = model.name, str(model.version), decoded.request.id
        size = _elements(outputs)
        if options is None and size < _LONG_ANSWER:
            fill_response(part, response, outputs, options)
        else:
            await self._tensors.run(size, fill_response, part, response, outputs, options)
        return bytes(whole.SerializeToString())


def _elements(tensors: list[Tensor]) -> int:
    return sum([tensor.array.size for tensor in tensors])
