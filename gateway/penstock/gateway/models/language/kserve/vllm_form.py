"""The tensors and parameters of Triton's vLLM backend.

Source: triton-inference-server/vllm_backend, src/model.py, src/utils/request.py and docs/additional_outputs.md. Left
out is `embedding_request`, which no engine here serves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from penstock.classic.messages import InferRequest
from penstock.classic.tensors import Tensor
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.models.language.choice_output import ChoiceDelta, TokenLogprob
from penstock.gateway.models.language.images.reader import RequestImage
from penstock.gateway.models.language.kserve.tensor_form import (
    Form,
    TextRequest,
    decoded,
    flag,
    generate_request,
    requested_outputs,
    sampling_fields,
    sampling_object,
    strings,
    text,
)
from penstock.gateway.models.language.models import ServedModel
from penstock.gateway.models.language.sampling import SamplingFields, bounded, priority_level

RETURNS = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
"""Outputs that come when `return_<name>` is true, or when the client names them."""
INPUTS = {
    "text_input": ("BYTES", 1),
    "stream": ("BOOL", 1),
    "sampling_parameters": ("BYTES", 1),
    "exclude_input_in_output": ("BOOL", 1),
    **{f"return_{output}": ("BOOL", 1) for output in RETURNS},
}
OUTPUTS = {
    "text_output": ("BYTES", -1),
    "finish_reason": ("BYTES", -1),
    "cumulative_logprob": ("FP32", -1),
    "logprobs": ("BYTES", -1),
    "num_input_tokens": ("UINT32", 1),
    "num_output_tokens": ("UINT32", -1),
}
UNSERVED = {
    "image": "this model reads text only",
    "embedding_request": "language models give no embeddings here",
}
OF_IMAGES = {"image": ("BYTES", -1)}
_MAX_LOGPROBS = 20
_DEFAULT_MAX_TOKENS = 16
"""vLLM's default, which users of its Triton backend know."""


class SamplingParameters(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The JSON object in `sampling_parameters`, or the request's parameters: names of vLLM's SamplingParams."""

    logprobs: int | None = None
    priority: int | None = None
    lora_name: str | None = None


def read_request(request: InferRequest, model: ServedModel, policy: str) -> TextRequest:
    """Raises InvalidRequestError, UnsupportedError."""
    prompt = text(request, "text_input")
    if prompt is None:
        raise InvalidRequestError("input 'text_input' is missing")
    stream = flag(request, "stream") or False
    excluded = flag(request, "exclude_input_in_output")
    if stream and excluded is False:
        raise InvalidRequestError("When streaming, exclude_input_in_output = false is not allowed.")
    returns = requested_outputs(request, RETURNS)
    sampling = _parameters(request)
    if sampling.logprobs is not None:
        bounded(sampling.logprobs, "logprobs", 0, _MAX_LOGPROBS)
    asks_logprobs = sampling.logprobs is not None
    generate = generate_request(
        request,
        model,
        sampling,
        prompt,
        model_defaults=model.default_params,
        default_max_tokens=_DEFAULT_MAX_TOKENS,
        logprobs=sampling.logprobs if asks_logprobs else 0 if "cumulative_logprob" in returns else None,
        priority=priority_level(sampling.priority if sampling.priority is not None else request.priority, policy),
    )
    generate = replace(generate, unread_images=_images(request))
    prefix = "" if stream or excluded else prompt
    return TextRequest(generate, stream, prefix, returns, asks_logprobs, sampling.lora_name)


def _images(request: InferRequest) -> tuple[RequestImage, ...]:
    """Texts in base64. Raises InvalidRequestError."""
    tensor = request.inputs.get("image")
    elements = () if tensor is None else tensor.array.ravel().tolist()
    return tuple(RequestImage(decoded(value, "image"), f"image[{n}]") for n, value in enumerate(elements))


def _parameters(request: InferRequest) -> SamplingParameters:
    """The tensor's JSON if there is one, else the request's parameters, whose values may be strings."""
    values = sampling_object(request)
    return sampling_fields(request.parameters if values is None else values, SamplingParameters)


class VllmWriter:
    """One element for each choice; those without news have an empty text."""

    def __init__(self, request: TextRequest) -> None:
        self._returns = request.returns
        self._shows_logprobs = request.logprobs
        self._prefix = request.prefix
        self._sums = [0.0] * request.generate.n
        """Of the logprobs of each choice's tokens so far."""
        self._prompt_tokens = 0

    def tensors(self, deltas: Sequence[ChoiceDelta | None], prompt_tokens: int) -> list[Tensor]:
        prefix, self._prefix = self._prefix, ""
        tensors = [strings("text_output", [prefix + (delta.text if delta else "") for delta in deltas])]
        if self._returns:
            self._prompt_tokens = prompt_tokens
            tensors += [_EXTRA[name](self, deltas) for name in RETURNS if name in self._returns]
        return tensors

    def _finish_reasons(self, deltas: Sequence[ChoiceDelta | None]) -> Tensor:
        return strings("finish_reason", [str(delta and delta.finish_reason) for delta in deltas])

    def _cumulative(self, deltas: Sequence[ChoiceDelta | None]) -> Tensor:
        add_logprobs(self._sums, deltas)
        return Tensor("cumulative_logprob", "FP32", np.array(self._sums, np.float32))

    def _logprobs(self, deltas: Sequence[ChoiceDelta | None]) -> Tensor:
        shown = self._shows_logprobs
        return strings(
            "logprobs",
            [_logprobs_json(delta.logprobs or []) if delta and shown else b"null" for delta in deltas],
        )

    def _num_input(self, deltas: Sequence[ChoiceDelta | None]) -> Tensor:
        return Tensor("num_input_tokens", "UINT32", np.array([self._prompt_tokens], np.uint32))

    def _num_output(self, deltas: Sequence[ChoiceDelta | None]) -> Tensor:
        counts = [len(delta.token_ids) if delta else 0 for delta in deltas]
        return Tensor("num_output_tokens", "UINT32", np.array(counts, np.uint32))


_EXTRA: dict[str, Callable[[VllmWriter, Sequence[ChoiceDelta | None]], Tensor]] = {
    "finish_reason": VllmWriter._finish_reasons,
    "cumulative_logprob": VllmWriter._cumulative,
    "logprobs": VllmWriter._logprobs,
    "num_input_tokens": VllmWriter._num_input,
    "num_output_tokens": VllmWriter._num_output,
}


def add_logprobs(sums: list[float], deltas: Sequence[ChoiceDelta | None]) -> None:
    """Adds those of the new tokens to each choice's sum."""
    for index, delta in enumerate(deltas):
        sums[index] += sum(entry.logprob for entry in delta.logprobs or ()) if delta else 0.0


def _logprobs_json(entries: Sequence[TokenLogprob]) -> bytes:
    """vLLM's form: for each token an object of token id -> {logprob, rank, decoded_token}, the sampled one included."""
    shown = []
    for entry in entries:
        tokens = {
            str(other.token_id): {"logprob": other.logprob, "rank": rank, "decoded_token": other.token}
            for rank, other in enumerate(entry.top, 1)
        }
        tokens[str(entry.token_id)] = {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.token}
        shown.append(tokens)
    return msgspec.json.encode(shown)


VLLM_FORM = Form(INPUTS, OUTPUTS, UNSERVED, read_request, VllmWriter, of_images=OF_IMAGES)
"""Of the backends `vllm` and `penstock`, and of models that stand on the command line."""
