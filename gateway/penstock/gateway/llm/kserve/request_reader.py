"""What a KServe client may ask a language model: the tensors and parameters of Triton's vLLM backend.

Source: triton-inference-server/vllm_backend, src/model.py and docs/additional_outputs.md. Left out are `image` and
`embedding_request`, which no engine here serves.
"""

from __future__ import annotations

from penstock.classic.messages import InferRequest
from penstock.engines.errors import InvalidRequestError
from penstock.gateway.llm.kserve.sampling_inputs import generate_request, sampling_fields, sampling_object
from penstock.gateway.llm.kserve.tensor_form import TextRequest, flag, text, wanted
from penstock.gateway.llm.models import ServedModel
from penstock.gateway.llm.sampling import SamplingFields, bounded, priority_level

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
    "image": "language models take no images here",
    "embedding_request": "language models give no embeddings here",
}
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
    returns = wanted(request, RETURNS)
    given = _parameters(request)
    if given.logprobs is not None:
        bounded(given.logprobs, "logprobs", 0, _MAX_LOGPROBS)
    asks_logprobs = given.logprobs is not None
    generate = generate_request(
        request,
        model,
        given,
        prompt,
        model_defaults=model.default_params,
        default_max_tokens=_DEFAULT_MAX_TOKENS,
        logprobs=given.logprobs if asks_logprobs else 0 if "cumulative_logprob" in returns else None,
        priority=priority_level(given.priority if given.priority is not None else request.priority, policy),
    )
    prefix = "" if stream or excluded else prompt
    return TextRequest(generate, stream, prefix, returns, asks_logprobs, given.lora_name)


def _parameters(request: InferRequest) -> SamplingParameters:
    """The tensor's JSON if there is one, else the request's parameters, whose values may be strings."""
    given = sampling_object(request)
    return sampling_fields(request.parameters if given is None else given, SamplingParameters)
