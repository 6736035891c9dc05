"""Models of other servers over KServe, from folders of a repository: Triton's tensors, as a text completion."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.classic.base import InferModel, ModelContext
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.model_config import ModelConfig
from penstock.classic.signature import ModelSignature, check_request
from penstock.classic.statistics import ModelStatistics
from penstock.engines.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NotReadyError,
    OverloadedError,
    PenstockError,
    UnsupportedError,
)
from penstock.gateway.configuration.config import ConfigError, explain
from penstock.gateway.configuration.plain_values import plain_settings
from penstock.gateway.configuration.upstream_settings import UpstreamSettings
from penstock.gateway.models.language.kserve.folder_layout import beside, check_one_instance, read_settings
from penstock.gateway.models.language.kserve.language_model import only_response
from penstock.gateway.models.language.kserve.tensor_form import (
    TensorForm,
    context_of,
    flag,
    sampling_object,
    strings,
    text,
)
from penstock.gateway.models.upstream.answer_reading import StreamReader
from penstock.gateway.models.upstream.attempts import CountedAnswer
from penstock.gateway.models.upstream.model import UpstreamModel
from penstock.gateway.models.upstream.relay import SilenceBounds, next_piece, note_first_token
from penstock.gateway.models.upstream.request_writing import UpstreamRequest
from penstock.gateway.models.upstream.service import Upstreams
from penstock.gateway.requests.context import RequestContext, until


class _Completion(NamedTuple):
    request: UpstreamRequest
    context: RequestContext
    prefix: str
    """What stands before the text."""
    streams: bool


class KServeStream:
    """Implements ResponseStream."""

    def __init__(self, model: UpstreamModel, completion: _Completion, statistics: ModelStatistics) -> None:
        self.streams = completion.streams
        self._model = model
        self._context = completion.context
        self._request = completion.request
        self._statistics = statistics
        self._prefix = completion.prefix
        self._answer: CountedAnswer | None = None
        self._reader: StreamReader | None = None
        self._over = False
        self._ended = False
        self._begun = time.monotonic_ns()
        self._has_responded = False
        statistics.pending += 1

    def __aiter__(self) -> KServeStream:
        return self

    async def __anext__(self) -> InferResponse:
        if self._ended:
            raise StopAsyncIteration
        try:
            async with until(self._context.deadline, DeadlineExceededError("The request's time was over.")):
                text = await self._shown()
        except PenstockError as error:
            self._responded()
            if self._answer is not None:
                self._answer.failed(error)
            self._end(error)
            return InferResponse(None, error=error)
        self._responded()
        shown, self._prefix = self._prefix + text, ""
        response = InferResponse([strings("text_output", [shown])], final=self._over)
        if self._over:
            self._end(None)
        return response

    def ready(self) -> InferResponse | None:
        """Nothing: whatever has come is in one response already."""
        return None

    async def _shown(self) -> str:
        """Of the next response: what has come, or all that comes. Raises PenstockError."""
        piece = await self._text()
        if self.streams and piece:
            return piece
        whole = StringIO()  # pieces may be of very few characters
        whole.write(piece)
        while not self._over and not (self.streams and piece):
            piece = await self._text()
            if self._answer is not None:
                self._answer.reader.keep(len(piece))
            whole.write(piece)
        return whole.getvalue()

    async def _text(self) -> str:
        """What has come since the last time; may be empty. Raises PenstockError."""
        if self._answer is None or self._reader is None:
            self._answer = await self._model.begin(self._context, self._request, "completions", self._model.name)
            self._reader = StreamReader(self._answer.reader, shows_usage=False)
            piece = self._answer.answer.first
        else:
            bounds = SilenceBounds(self._model.settings.idle_timeout, 0)
            piece = await next_piece(self._answer.answer, self._answer.reader, bounds)
        reader = self._reader
        if piece:
            frames = reader.feed(piece)
            if reader.error is not None:
                raise reader.error
        else:
            frames = b""
            reader.end()
        self._over = reader.done or not piece
        if reader.has_text:
            note_first_token(self._context)
        if self._over:
            self._context.record.finish_reasons = reader.finish_reasons
            self._answer.answer.end("200")
        return _text_of(frames)

    def close(self) -> None:
        self._end(None, cancelled=True)

    def _responded(self) -> None:
        if not self._has_responded:
            self._has_responded = True
            if self._statistics.observer is not None:
                self._statistics.observer.first_response(time.monotonic_ns() - self._begun)

    def _end(self, error: PenstockError | None, *, cancelled: bool = False) -> None:
        if self._ended:
            return
        self._ended = True
        self._statistics.pending -= 1
        if self._answer is not None:
            self._answer.end()
        total = time.monotonic_ns() - self._begun
        if error is not None or cancelled:
            reason = "REJECTED" if isinstance(error, OverloadedError) else "BACKEND"
            self._statistics.failed(total, "CANCELED" if cancelled else reason)
            return
        if self._statistics.observer is not None:
            self._statistics.observer.request(total, 0, 0, total, 0)
        self._statistics.executed(1, 0, total, 0)
        self._statistics.succeeded(
            requests=1, inferences=1, total=total, queue=0, compute_input=0, compute_infer=total, compute_output=0
        )


class _Choice(msgspec.Struct):
    text: Any = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []


def _text_of(frames: bytes) -> str:
    """Of frames as StreamReader writes them."""
    events = [frame[6:] for frame in frames.split(b"\n\n") if frame.startswith(b"data: ")]
    texts = [choice.text for event in events for choice in _decode(event).choices]
    return "".join(text for text in texts if isinstance(text, str))


_decode = msgspec.json.Decoder(_Event).decode


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
        completion = self._read(request)
        return await only_response(lambda: self._begun(completion), streams=completion.streams)

    def stream(self, request: InferRequest) -> KServeStream:
        return self._begun(self._read(request))

    def _begun(self, completion: _Completion) -> KServeStream:
        completion.context.pay_tokens(completion.request.expected_tokens)
        return KServeStream(self._model, completion, self.statistics)

    def _read(self, request: InferRequest) -> _Completion:
        try:
            if self._stopping:
                raise NotReadyError(f"Model '{self.name}' is not ready.", retry_after=2)
            check_request(request, self.signature)
            return self._text_completion(request)
        except PenstockError:
            self.statistics.failed(0, "REJECTED")
            raise

    def _text_completion(self, request: InferRequest) -> _Completion:
        if "completions" not in self._model.apis:
            raise UnsupportedError(f"The model `{self.name}` of another server has no text completions.")
        prompt = text(request, "text_input")
        if prompt is None:
            raise InvalidRequestError("input 'text_input' is missing")
        streams, excluded = bool(flag(request, "stream")), flag(request, "exclude_input_in_output")
        if streams and excluded is False:
            raise InvalidRequestError("When streaming, exclude_input_in_output = false is not allowed.")
        parameters = _parameters(request)
        for name in parameters:
            if name in _WRITTEN_HERE:
                raise UnsupportedError(f"The sampling parameter '{name}' is not supported.")
        body = msgspec.json.encode({**parameters, "prompt": prompt, "stream": True})
        prefix = "" if streams or excluded else prompt
        return _Completion(UpstreamRequest(body, "completions"), context_of(request), prefix, streams)

    async def stop(self) -> None:
        self._stopping = True
        await self._upstreams.remove(self._model)


def _parameters(request: InferRequest) -> dict[str, Any]:
    """The tensor's JSON if there is one, else the request's parameters without headers, which are for this server."""
    sampling = sampling_object(request)
    if sampling is not None:
        return sampling
    headers = context_of(request).headers
    return {name: value for name, value in request.parameters.items() if name.lower().encode() not in headers}


# `backend: "openai"` of a model repository: a folder whose `model.json` says which server has the model.
#
# It holds the settings of docs/upstream.md, without `name`, which is the folder's. The configuration's `parameters`
# may set those that are no lists or tables.

_FILE = "model.json"
_FILES = ("api_key_file", "ca_file", "tokenizer")


class UpstreamLoader:
    """A Loader of the model repository."""

    def __init__(self, upstreams: Callable[[], Upstreams]) -> None:
        self._upstreams = upstreams

    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        """The tensors of the form, and whether the settings can be read. Raises ValueError."""
        upstream_settings(config, version_folder)
        FORM.complete(config)

    async def load(self, context: ModelContext) -> InferModel:
        FORM.check(context.config)
        check_one_instance(context.config)
        context.config.model_transaction_policy.decoupled = True  # also where nothing completes configurations
        upstreams = self._upstreams()
        settings = upstream_settings(context.config, context.version_folder)
        model = await asyncio.to_thread(upstreams.build, settings)  # it may read a tokenizer
        upstreams.add(model)
        return KServeUpstream(upstreams, model, version=context.version, config=context.config)


def upstream_settings(config: ModelConfig, folder: Path) -> UpstreamSettings:
    """Of a model's folder. Raises ConfigError."""
    fields: dict[str, Any] = read_settings(folder / _FILE, json.loads, "JSON") or {}
    fields |= {name: value.string_value for name, value in config.parameters.items()}
    if "name" in fields:
        raise ConfigError("'name' is the folder's")
    for name in _FILES:
        if isinstance(fields.get(name), str):
            fields[name] = beside(fields[name], folder)
    try:
        plain = plain_settings(UpstreamSettings, {**fields, "name": config.name})
        return msgspec.convert(plain, UpstreamSettings, strict=False)
    except ValueError as error:  # msgspec's among them
        raise ConfigError(explain(str(error))) from None
