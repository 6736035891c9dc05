"""ModelInfer, and what it shares with ModelStreamInfer."""

from __future__ import annotations

import re
import time
from typing import Any

from tritonclient.grpc.service_pb2 import ModelInferResponse

from penstock.engines.classic.base import InferModel
from penstock.engines.errors import UnsupportedError
from penstock.gateway.kserve.classification import Labels
from penstock.gateway.kserve.context import KServe
from penstock.gateway.kserve.grpc.decode import Decoded, decode
from penstock.gateway.kserve.grpc.encode import fill_response, with_classes
from penstock.gateway.kserve.grpc.rpc import Context, Message
from penstock.gateway.kserve.headers import forwarded
from penstock.gateway.kserve.parameters import take_parameters


class Inference:
    """Turns messages into requests for models, and their responses into messages."""

    def __init__(self, kserve: KServe, header_pattern: re.Pattern[str] | None) -> None:
        """`header_pattern` says which metadata go to the model as parameters."""
        self._models = kserve.models
        self._regions = kserve.shared_memory
        self._tracing = kserve.tracing
        self._pattern = header_pattern
        self.labels = Labels()

    def model(self, message: Message) -> InferModel:
        """Raises ModelNotFoundError, InvalidRequestError."""
        return self._models.model(message.model_name, message.model_version)

    def request(self, message: Message, model: InferModel, context: Context, tenant: str) -> Decoded:
        """Raises PenstockError for what cannot be asked like this."""
        decoded = decode(message, model, self._regions)
        request = decoded.request
        request.tenant = tenant
        remaining = context.time_remaining()
        if remaining is not None:
            request.deadline = time.monotonic() + remaining
        if self._pattern is not None:
            texts = ((name, value) for name, value in context.invocation_metadata() if isinstance(value, str))
            take_parameters(request, forwarded(texts, self._pattern))
        return decoded

    def trace(self, model: InferModel, request_id: str) -> Any:
        """The trace of a request that is to be traced, or None."""
        return self._tracing.start(model.name, model.version, request_id) if self._tracing.active else None

    async def infer(self, message: Message, context: Context, tenant: str) -> Message:
        """ModelInfer. Cancelling it cancels the request. Raises PenstockError."""
        model = self.model(message)
        if model.config.model_transaction_policy.decoupled:
            raise UnsupportedError("ModelInfer RPC doesn't support models with decoupled transaction policy")
        decoded = self.request(message, model, context, tenant)
        trace = self.trace(model, decoded.request.id)
        if trace is None:
            return await self._answer(model, decoded)
        try:
            trace.inputs(decoded.request)
            trace.mark_now("REQUEST_START")
            return await self._answer(model, decoded)
        finally:
            trace.mark_now("REQUEST_END")
            trace.finish()

    async def _answer(self, model: InferModel, decoded: Decoded) -> Message:
        request = decoded.request
        response = await model.infer(request)
        if response.error is not None:
            raise response.error
        outputs = response.outputs or []
        if request.trace is not None:
            request.trace.outputs(outputs)  # type: ignore[attr-defined]
        if decoded.options is not None:
            outputs = await with_classes(outputs, model, decoded.options, self.labels)
        message = ModelInferResponse(model_name=model.name, model_version=str(model.version), id=request.id)
        fill_response(message, response, outputs, decoded.options)
        return message
