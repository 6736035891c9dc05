"""A language model as a decoupled KServe model: a form's tensors over our own data plane."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

from penstock.classic.base import PushedStream, ResponseListener, ResponseStream
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.model_config import ModelConfig
from penstock.classic.signature import ModelSignature, check_request
from penstock.classic.statistics import ModelStatistics
from penstock.classic.tensors import Tensor
from penstock.engines.errors import (
    CancelledError,
    EngineError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    PenstockError,
    UnsupportedError,
)
from penstock.gateway.models.language.choice_output import ChoiceDelta
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.models.language.generation import Generation
from penstock.gateway.models.language.kserve.tensor_form import Form, TextRequest
from penstock.gateway.models.language.kserve.vllm_form import VLLM_FORM
from penstock.gateway.models.language.models import LoadedModel

CANCELLED = "Request cancelled by client"

_Key = tuple[str, str]
"""A request's tenant and id."""


class _Shape(NamedTuple):
    form: Form
    config: ModelConfig
    signature: ModelSignature

    def with_images(self) -> _Shape:
        form = self.form.with_images()
        form.add_images(self.config)
        return _Shape(form, self.config, ModelSignature(self.config))


class LanguageModel:
    """Implements InferModel. `policy` is the scheduler's."""

    def __init__(
        self,
        dataplane: DataPlane,
        model: LoadedModel,
        name: str,
        *,
        policy: str,
        version: int = 1,
        config: ModelConfig | None = None,
        form: Form = VLLM_FORM,
    ) -> None:
        self.name = name
        self.version = version
        config = config or form.config(name, "penstock")
        self._shape = _Shape(form, config, ModelSignature(config))
        self._knows_images = False
        self.statistics = ModelStatistics()
        self._dataplane = dataplane
        self._model = model
        self.policy = policy
        self._by_id: dict[_Key, set[LanguageStream]] = {}
        """What runs, where the form lets clients cancel requests by their id."""
        self._stopping = False

    @property
    def shape(self) -> _Shape:
        """With the inputs for images once the model has loaded and reads them."""
        if not self._knows_images and self._model.loaded:
            self._knows_images = True
            if self._model.image_reader is not None:
                self._shape = self._shape.with_images()
        return self._shape

    @property
    def config(self) -> ModelConfig:
        return self.shape.config

    @property
    def signature(self) -> ModelSignature:
        return self.shape.signature

    @property
    def form(self) -> Form:
        return self.shape.form

    @property
    def ready(self) -> bool:
        return self._model.loaded and self._model.ready and not self._stopping

    @property
    def loaded_model(self) -> LoadedModel:
        """What serves it, for other ways to ask it."""
        return self._model

    takes_infer = True
    model_folder: Path | None = None

    async def infer(self, request: InferRequest) -> InferResponse:
        text = self._read(request)
        return await only_response(lambda: self._stream(request, text), streams=text.stream)

    def stream(self, request: InferRequest) -> LanguageStream:
        return self._stream(request, self._read(request))

    def _stream(self, request: InferRequest, text: TextRequest) -> LanguageStream:
        if not request.id or self.form.cancels is None:
            return LanguageStream(self, request, text)
        key = (request.tenant, request.id)
        stream = LanguageStream(self, request, text, key)
        self._by_id.setdefault(key, set()).add(stream)
        return stream

    def generate(self, text: TextRequest) -> Coroutine[Any, Any, Generation]:
        """As DataPlane.generate_on, on this model."""
        return self._dataplane.generate_on(self._model, text.generate, adapter=text.adapter)

    def forget(self, key: _Key, stream: LanguageStream) -> None:
        """It has ended and cannot be cancelled any more."""
        streams = self._by_id[key]
        streams.discard(stream)
        if not streams:
            del self._by_id[key]

    def _read(self, request: InferRequest) -> TextRequest:
        """Raises CancelledError for a request that has cancelled others: that is its answer."""
        try:
            if self._stopping or not self._model.loaded:
                raise NotReadyError(f"Model '{self.name}' is not ready.", retry_after=2)
            self.form.check_request(request)
            check_request(request, self.signature)
            if self.form.cancels is not None and self.form.cancels(request):
                self._cancel(request)
            text = self.form.read(request, self._model.describe(self.name), self.policy)
            if text.adapter is not None:
                text.generate.context.principal.require_model(text.adapter)  # elsewhere it is a model's name
                self._model.adapters.named(text.adapter)
            return text
        except PenstockError as error:
            self.statistics.failed(0, "CANCELED" if isinstance(error, CancelledError) else "REJECTED")
            raise

    def _cancel(self, request: InferRequest) -> None:
        if not request.id:
            raise InvalidRequestError("A request id must be provided for request cancellation")
        for stream in tuple(self._by_id.get((request.tenant, request.id), ())):
            stream.cancel()
        raise CancelledError(CANCELLED)

    async def stop(self) -> None:
        self._stopping = True
        self._dataplane.models.remove(self._model)
        await self._model.in_flight.wait_idle()
        await self._model.stop()


class LanguageStream(PushedStream):
    """The responses of one request: deltas as they come, or everything at the end."""

    def __init__(self, model: LanguageModel, request: InferRequest, text: TextRequest, key: _Key | None = None) -> None:
        """`key`: by which another request may cancel this one."""
        self._model = model
        self._text = text
        self._writer = model.form.writer(text)
        self._outputs = frozenset(request.outputs)
        self._timings = request.timings
        self._key = key
        self.pushes = text.stream and key is None
        self._listener: ResponseListener | None = None
        self._generation: Generation | None = None
        self._beginning: asyncio.Task[Generation] | None = None
        self._cancelled = False
        self._live = text.generate.n
        self._begun = time.monotonic_ns()
        self._has_responded = False
        self._ended = False
        self._statistics = model.statistics
        self._statistics.pending += 1

    def __aiter__(self) -> LanguageStream:
        return self

    async def __anext__(self) -> InferResponse:
        if self._ended:
            raise StopAsyncIteration
        try:
            deltas = await self._advance()
            while not self._text.stream and self._live:
                deltas = _merged(deltas, await self._advance())
        except PenstockError as error:
            return self._error(error)
        return self._response(deltas)

    def _error(self, error: PenstockError) -> InferResponse:
        if not self._has_responded:
            self._responded()
        self._failed(_reason(error))
        return InferResponse(None, error=error)

    def _response(self, deltas: list[ChoiceDelta]) -> InferResponse:
        if not self._has_responded:
            self._responded()
        final = not self._live
        response = InferResponse(self._tensors(deltas), final=final)
        if final:
            self._succeeded()
        return response

    def ready(self) -> InferResponse | None:
        """Nothing: whatever has come is in one response already."""
        return None

    async def _advance(self) -> list[ChoiceDelta]:
        if self._generation is None:
            self._generation = await self._begin()
            self._statistics.pending -= 1
        try:
            deltas = await self._generation.__anext__()
        except StopAsyncIteration:
            if self._cancelled:
                raise CancelledError(CANCELLED) from None
            raise EngineError("The engine ended the request without a reason.") from None
        self._count(deltas)
        return deltas

    def _count(self, deltas: list[ChoiceDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                self._live -= 1

    # Pushing, once the first response has been fetched

    def listen(self, listener: ResponseListener | None) -> None:
        self._listener = listener
        if self._generation is not None:
            self._generation.listen(None if listener is None else self)

    def take(self, deltas: list[ChoiceDelta]) -> None:
        self._count(deltas)
        response = self._response(deltas)
        if self._listener is not None:
            self._listener.take(response)

    def fail(self, error: Exception) -> None:
        failure = error if isinstance(error, PenstockError) else EngineError(str(error))
        if self._listener is not None:
            self._listener.take(self._error(failure))

    async def _begin(self) -> Generation:
        if self._cancelled:
            raise CancelledError(CANCELLED)
        begin = self._model.generate(self._text)
        if self._key is None:
            return await begin
        beginning = self._beginning = asyncio.create_task(begin)
        try:
            generation = await beginning
        except asyncio.CancelledError:
            if not beginning.cancelled() and beginning.exception() is None:  # it began in the same turn of the loop
                beginning.result().close()
            if self._cancelled:
                raise CancelledError(CANCELLED) from None
            raise
        finally:
            self._beginning = None
        if self._cancelled:
            generation.close()
            raise CancelledError(CANCELLED)
        return generation

    def cancel(self) -> None:
        """Another request has asked for it: this one ends with an error, and what it had is given back at once."""
        self._cancelled = True
        if self._beginning is not None:
            self._beginning.cancel()
        if self._generation is not None:
            self._generation.close()

    def close(self) -> None:
        self._failed("CANCELED")

    def _responded(self) -> None:
        """There is a first response, or an error in its place."""
        self._has_responded = True
        if self._statistics.observer is not None:
            self._statistics.observer.first_response(time.monotonic_ns() - self._begun)

    def _failed(self, reason: str) -> None:
        """Counts a request that did not succeed, and gives up what still runs."""
        if self._ended:
            return
        self._end()
        if self._generation is None:
            self._statistics.pending -= 1
        else:
            self._generation.close()
        self._statistics.failed(time.monotonic_ns() - self._begun, reason)

    def _succeeded(self) -> None:
        self._end()
        total = time.monotonic_ns() - self._begun
        queue = min(int(self._generation.queue_seconds * 1e9), total) if self._generation else 0
        if self._timings is not None:
            self._timings.add(0, total - queue, 0)
        if self._statistics.observer is not None:
            self._statistics.observer.request(total, queue, 0, total - queue, 0)
        self._statistics.executed(1, 0, total - queue, 0)
        self._statistics.succeeded(
            requests=1,
            inferences=1,
            total=total,
            queue=queue,
            compute_input=0,
            compute_infer=total - queue,
            compute_output=0,
        )

    def _end(self) -> None:
        self._ended = True
        if self._key is not None:
            self._model.forget(self._key, self)

    def _tensors(self, deltas: list[ChoiceDelta]) -> list[Tensor]:
        by_index: list[ChoiceDelta | None] = [None] * self._text.generate.n
        for delta in deltas:
            by_index[delta.index] = delta
        tensors = self._writer.tensors(by_index, self._generation.usage.prompt_tokens if self._generation else 0)
        if self._outputs:
            tensors = [tensor for tensor in tensors if tensor.name in self._outputs]
        return tensors


def _reason(error: PenstockError) -> str:
    """Triton's label of a failure."""
    if isinstance(error, CancelledError):
        return "CANCELED"
    return "REJECTED" if isinstance(error, OverloadedError) else "BACKEND"


def _merged(before: list[ChoiceDelta], after: list[ChoiceDelta]) -> list[ChoiceDelta]:
    """The deltas of both, one for each choice. Appends in place: a long answer is not copied for each of its steps."""
    known = {delta.index: delta for delta in before}
    for delta in after:
        first = known.get(delta.index)
        if first is None:
            before.append(delta)
            continue
        first.text += delta.text
        first.token_ids += delta.token_ids
        first.finish_reason = delta.finish_reason
        first.stop_reason = delta.stop_reason
        if delta.logprobs is not None:
            first.logprobs = [*(first.logprobs or ()), *delta.logprobs]
    return before


async def only_response(begin: Callable[[], ResponseStream], *, streams: bool) -> InferResponse:
    """For requests that do not stream: those have exactly one response. Raises UnsupportedError for others, without
    beginning, and the error that the response is."""
    if streams:
        raise UnsupportedError("a request that streams has many responses; it needs a stream to carry them")
    responses = begin()
    try:
        response = await anext(responses)
    finally:
        responses.close()
    if response.error is not None:
        raise response.error
    return response
