"""A language model as a decoupled KServe model: a form's tensors over our own data plane."""

from __future__ import annotations

from pathlib import Path

from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.model_config import ModelConfig
from penstock.classic.signature import ModelSignature, check_request
from penstock.classic.statistics import ModelStatistics
from penstock.engines.errors import (
    CancelledError,
    InvalidRequestError,
    NotReadyError,
    PenstockError,
)
from penstock.gateway.llm.dataplane import DataPlane
from penstock.gateway.llm.kserve.language_stream import CANCELLED, LanguageStream
from penstock.gateway.llm.kserve.only_response import only_response
from penstock.gateway.llm.kserve.tensor_form import Form, TextRequest
from penstock.gateway.llm.kserve.vllm_form import VLLM_FORM
from penstock.gateway.llm.models import LoadedModel

_Key = tuple[str, str]
"""A request's tenant and id."""


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
        self.config = config or form.config(name, "penstock")
        self.statistics = ModelStatistics()
        self._dataplane = dataplane
        self._model = model
        self.policy = policy
        self.form = form
        self._by_id: dict[_Key, set[LanguageStream]] = {}
        """What runs, where the form lets clients cancel requests by their id."""
        self.signature = ModelSignature(self.config)
        self._stopping = False

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
        writer = self.form.writer(text)
        about = (self._dataplane, self._model, text, writer, self.statistics, request.outputs, request.timings)
        if not request.id or self.form.cancels is None:
            return LanguageStream(*about)
        key = (request.tenant, request.id)

        def forget(ended: LanguageStream) -> None:
            streams = self._by_id[key]
            streams.discard(ended)
            if not streams:
                del self._by_id[key]

        stream = LanguageStream(*about, on_end=forget)
        self._by_id.setdefault(key, set()).add(stream)
        return stream

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
