"""The tensor plane: the one way of requests that carry tensors, whatever protocol they come by.

A front converts, calls and converts. It has the model found and its message decoded; `begin` hands the request to the
model; what comes back, it has encoded. Threads for long work, classes, and traces are here; whose a
name is, who may use it and what is loaded for it says the catalogue.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from penstock.classic.base import AdmittedLater, InferModel, ResponseStream
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.tensors import Tensor
from penstock.gateway.apis.kserve.classification import Labels, classified
from penstock.gateway.apis.kserve.shared_memory import SharedMemoryRegions, SharedMemorySlice
from penstock.gateway.apis.kserve.store import ModelNames, ModelStore
from penstock.gateway.apis.kserve.tracing import RequestTrace, Tracing
from penstock.gateway.requests.context import RequestContext, Role
from penstock.gateway.requests.intake import WorkPool
from penstock.gateway.requests.record import Stage

T = TypeVar("T")

LONG_BODY = 1 << 20
LONG_TEXT = 1 << 16
LONG_ANSWER = 1 << 17
"""From so many bytes of a request, of its JSON or strings, and elements of an answer, coding them is left to a thread:
it would hold up all other requests. So is what may read shared memory, whose size no body shows."""


@dataclass(slots=True)
class OutputForm:
    """How an output is to be answered."""

    classes: int = 0
    """By so many best classes; 0: by the tensor."""
    memory: SharedMemorySlice | None = None
    """Where it is to be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """A protocol's names, as Triton's, for what a trace notes beside the model's own events. Empty: not noted."""

    received: str
    sending: str = ""
    began: str = ""
    """The first byte has come."""
    sent: str = ""


class TensorCall:
    """A request on its way through the model that has it. Closed when it is answered."""

    __slots__ = ("model", "request")

    def __init__(self, model: InferModel, request: InferRequest) -> None:
        self.model = model
        self.request = request

    def infer(self) -> Awaitable[InferResponse]:
        """As InferModel has it."""
        return self.model.infer(self.request)

    def stream(self) -> ResponseStream:
        """As InferModel has it."""
        return self.model.stream(self.request)

    def sent(self) -> None:
        """The whole answer has been handed to the transport."""

    def close(self) -> None:
        """Idempotent."""


class TensorPlane:
    """Lives on the event loop."""

    def __init__(
        self,
        names: ModelNames,
        models: ModelStore,
        regions: SharedMemoryRegions,
        tracing: Tracing,
        pool: WorkPool,
    ) -> None:
        self._models = models
        self._names = names
        self._regions = regions
        self._tracing = tracing
        self._pool = pool
        self._labels = Labels()

    async def find_before_body(self, name: str, version: str, context: RequestContext) -> InferModel | None:
        """The model, before its request is there. None where requests load models: `find` gives it, once the request
        is there. Raises PenstockError."""
        return None if await self._names.offers(name, context) else self._models.model(name, version)

    async def find(self, name: str, version: str, context: RequestContext) -> InferModel:
        """The model that serves the request, which is loaded for it if need be. Raises PenstockError."""
        await self._names.admit(name, version, context)
        return self._models.model(name, version)

    async def describe(self, name: str, version: str, context: RequestContext) -> InferModel:
        """The model, to say what it is; loaded for those who may ask it. Raises PenstockError."""
        await self._names.admit(name, version, context, loads=Role.INFERENCE in context.principal.roles)
        return self._models.model(name, version)

    def would_load(self, name: str) -> bool:
        """Whether a request would load this model, which does not serve."""
        return self._names.would_load(name)

    def regions(self, context: RequestContext, hold: Callable[[int], None]) -> SharedMemoryRegions:
        """Those of the request's caller. `hold` is told of the bytes of each tensor before it is read."""
        regions = self._regions
        return regions.of(context.principal, hold, context) if regions.allowed else regions

    @property
    def takes_memory(self) -> bool:
        """Whether requests may name shared memory."""
        return self._regions.allowed

    async def in_thread(self, size: int, work: Callable[..., T], *args: object) -> T:
        """What `work` gives, on so many bytes of a request or elements of an answer. Raises as it and
        OverloadedError."""
        return await self._pool.run(size, work, *args)

    def begin(
        self,
        model: InferModel,
        version: str,
        request: InferRequest,
        context: RequestContext,
        moments: Moments | None = None,
        began: int = 0,
    ) -> TensorCall:
        """Hands the request, which has been decoded for `model`, to the model that gets it: a reload may have replaced
        that one meanwhile, and a name that several serve leads to one of them. With `moments` it may be traced;
        `began`, of time.monotonic_ns(), is when it came in. Raises as ModelStore.model."""
        context.record.model = model.name
        context.record.enter(Stage.MODEL)
        request.caller = context
        request.tenant = context.tenant
        request.deadline = context.deadline
        model = self._models.model(model.name, version, request)
        if self._tracing.active and moments is not None:
            trace = self._tracing.start(model.name, model.version, request.id)
            if trace is not None:
                return _TracedCall(model, request, trace, moments, began)
        return TensorCall(model, request)

    async def in_forms(self, model: InferModel, outputs: list[Tensor], forms: Mapping[str, OutputForm]) -> list[Tensor]:
        """The outputs, those as classes of which the caller wants classes. Raises InvalidRequestError for types that
        have none, EngineError for label files that cannot be read, OverloadedError."""
        batched = model.config.max_batch_size > 0
        formed = []
        for tensor in outputs:
            form = forms.get(tensor.name)
            if form is not None and form.classes:
                names = await self._labels.of(model, tensor.name)
                choose = partial(classified, tensor, form.classes, batched=batched, labels=names)
                tensor = await self._pool.run(tensor.array.size, choose)  # a million of them take a second
            formed.append(tensor)
        return formed

    async def encode(self, outputs: Sequence[Tensor], encode: Callable[..., T], *args: object) -> T:
        """What `encode` gives, in a thread where the outputs are long. Raises as it and OverloadedError."""
        size = sum([tensor.array.size for tensor in outputs])
        return encode(*args) if size < LONG_ANSWER else await self._pool.run(size, encode, *args)


class _TracedCall(TensorCall):
    __slots__ = ("_marked", "_moments", "_trace")

    def __init__(
        self, model: InferModel, request: InferRequest, trace: RequestTrace, moments: Moments, began: int
    ) -> None:
        super().__init__(model, request)
        self._trace = trace
        self._moments = moments
        self._marked = {""}
        if moments.began:
            trace.mark(moments.began, began)
        self._mark(moments.received)
        trace.inputs(request)
        self._mark("REQUEST_START")

    def _mark(self, event: str) -> None:
        """Once."""
        if event not in self._marked:
            self._marked.add(event)
            self._trace.mark_now(event)

    async def infer(self) -> InferResponse:
        response = await self.model.infer(self.request)
        self._mark("REQUEST_END")
        self.note(response)
        return response

    def stream(self) -> ResponseStream:
        return _TracedStream(self.model.stream(self.request), self)

    def note(self, response: InferResponse) -> None:
        """Of a response that is going to be sent."""
        self._trace.outputs(response.outputs or ())
        self._mark(self._moments.sending)

    def note_end(self) -> None:
        self._mark("REQUEST_END")

    def sent(self) -> None:
        self._mark(self._moments.sent)

    def close(self) -> None:
        self._trace.finish()


class _TracedStream(ResponseStream, AdmittedLater):
    def __init__(self, responses: ResponseStream, call: _TracedCall) -> None:
        self._responses = responses
        self._call = call

    def __aiter__(self) -> ResponseStream:
        return self

    async def __anext__(self) -> InferResponse:
        return self._noted(await self._responses.__anext__())

    def ready(self) -> InferResponse | None:
        response = self._responses.ready()
        return None if response is None else self._noted(response)

    def _noted(self, response: InferResponse) -> InferResponse:
        if response.error is None:
            self._call.note(response)
            if response.final:
                self._call.note_end()
        return response

    async def admitted(self) -> None:
        if isinstance(self._responses, AdmittedLater):
            await self._responses.admitted()

    def close(self) -> None:
        self._responses.close()
