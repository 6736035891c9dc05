"""A model of another server over KServe: Triton's tensors for a prompt and a text, as a text completion."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.model_config import ModelConfig
from penstock.classic.signature import ModelSignature, check_request
from penstock.classic.statistics import ModelStatistics
from penstock.engines.errors import InvalidRequestError, NotReadyError, PenstockError, UnsupportedError
from penstock.gateway.front.context import RequestContext
from penstock.gateway.llm.kserve.language_model import only_response
from penstock.gateway.llm.kserve.tensor_form import TensorForm, context_of, flag, sampling_object, text
from penstock.gateway.upstream.kserve_stream import KServeStream
from penstock.gateway.upstream.model import UpstreamModel
from penstock.gateway.upstream.request_body import UpstreamRequest
from penstock.gateway.upstream.service import Upstreams

FORM = TensorForm(
    {
        "text_input": ("BYTES", 1),
        "stream": ("BOOL", 1),
        "sampling_parameters": ("BYTES", 1),
        "exclude_input_in_output": ("BOOL", 1),
    },
    {"text_output": ("BYTES", 1)},
    {},
)
"""The part of the vLLM backend's that a text completion has."""
_WRITTEN_HERE = frozenset({"model", "prompt", "stream", "stream_options", "echo", "n"})


class _Asked(NamedTuple):
    request: UpstreamRequest
    context: RequestContext
    prefix: str
    """What stands before the text."""
    streams: bool


class KServeUpstream:
    """Implements InferModel."""

    takes_infer = True
    model_folder: Path | None = None

    def __init__(self, upstreams: Upstreams, model: UpstreamModel, *, version: int, config: ModelConfig) -> None:
        self.name = model.name
        self.version = version
        self.config = config
        self.signature = ModelSignature(config)
        self.statistics = ModelStatistics()
        self._upstreams = upstreams
        self._model = model
        self._stopping = False

    @property
    def ready(self) -> bool:
        return not self._stopping and self._model.fleet.available

    async def infer(self, request: InferRequest) -> InferResponse:
        asked = self._read(request)
        return await only_response(lambda: self._begun(asked), streams=asked.streams)

    def stream(self, request: InferRequest) -> KServeStream:
        return self._begun(self._read(request))

    def _begun(self, asked: _Asked) -> KServeStream:
        asked.context.pay_tokens(asked.request.expected_tokens)
        return KServeStream(
            self._model, asked.context, asked.request, self.statistics, asked.prefix, streams=asked.streams
        )

    def _read(self, request: InferRequest) -> _Asked:
        try:
            if self._stopping:
                raise NotReadyError(f"Model '{self.name}' is not ready.", retry_after=2)
            check_request(request, self.signature)
            return self._text_completion(request)
        except PenstockError:
            self.statistics.failed(0, "REJECTED")
            raise

    def _text_completion(self, request: InferRequest) -> _Asked:
        if "completions" not in self._model.apis:
            raise UnsupportedError(f"The model `{self.name}` of another server has no text completions.")
        prompt = text(request, "text_input")
        if prompt is None:
            raise InvalidRequestError("input 'text_input' is missing")
        streams, excluded = bool(flag(request, "stream")), flag(request, "exclude_input_in_output")
        if streams and excluded is False:
            raise InvalidRequestError("When streaming, exclude_input_in_output = false is not allowed.")
        given = _parameters(request)
        for name in given:
            if name in _WRITTEN_HERE:
                raise UnsupportedError(f"The sampling parameter '{name}' is not supported.")
        body = msgspec.json.encode({**given, "prompt": prompt, "stream": True})
        prefix = "" if streams or excluded else prompt
        return _Asked(UpstreamRequest(body, "completions"), context_of(request), prefix, streams)

    async def stop(self) -> None:
        self._stopping = True
        await self._upstreams.remove(self._model)


def _parameters(request: InferRequest) -> dict[str, Any]:
    """The tensor's JSON if there is one, else the request's parameters without headers, which are for this server."""
    given = sampling_object(request)
    if given is not None:
        return given
    headers = context_of(request).headers
    return {name: value for name, value in request.parameters.items() if name.lower().encode() not in headers}
