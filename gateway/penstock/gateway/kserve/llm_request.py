"""What a KServe client may ask a language model: the tensors and parameters of Triton's vLLM backend.

Source: triton-inference-server/vllm_backend, src/model.py and docs/additional_outputs.md. Left out are `image` and
`embedding_request`, which no engine here serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from penstock.engines.classic.messages import InferRequest
from penstock.engines.errors import InvalidRequestError, PenstockError, UnsupportedError
from penstock.gateway.generation import GenerateRequest
from penstock.gateway.http.json_body import check_json, decode_json
from penstock.gateway.kserve.llm_form import TextRequest, flag, text
from penstock.gateway.models import ServedModel
from penstock.gateway.sampling import SamplingFields, bounded, priority_level, sampling_params, stop_strings

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
_MAX_N = 128
_MAX_LOGPROBS = 20
_MAX_TOKENS = 2**31 - 1
_MAX_SAMPLING_BYTES = 1 << 20
_DEFAULT_MAX_TOKENS = 16
"""vLLM's default, which users of its Triton backend know."""


_Fields = TypeVar("_Fields", bound=SamplingFields)


class SamplingParameters(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The JSON object in `sampling_parameters`, or the request's parameters: names of vLLM's SamplingParams."""

    logprobs: int | None = None
    priority: int | None = None
    lora_name: str | None = None


def read_request(request: InferRequest, model: ServedModel, policy: str, timeout: float | None) -> TextRequest:
    """Raises InvalidRequestError, UnsupportedError."""
    prompt = text(request, "text_input")
    if prompt is None:
        raise InvalidRequestError("input 'text_input' is missing")
    stream = flag(request, "stream") or False
    excluded = flag(request, "exclude_input_in_output")
    if stream and excluded is False:
        raise InvalidRequestError("When streaming, exclude_input_in_output = false is not allowed.")
    wanted = frozenset(name for name in RETURNS if flag(request, f"return_{name}") or name in request.outputs)
    given = _parameters(request)
    if given.logprobs is not None:
        bounded(given.logprobs, "logprobs", 0, _MAX_LOGPROBS)
    asks_logprobs = given.logprobs is not None
    max_tokens = _DEFAULT_MAX_TOKENS if given.max_tokens is None else given.max_tokens
    generate = GenerateRequest(
        model=model.name,
        prompts=[prompt],
        params=sampling_params(
            given,
            model.info,
            model.default_params,
            max_tokens=bounded(max_tokens, "max_tokens", 1, _MAX_TOKENS),
            logprobs=given.logprobs if asks_logprobs else 0 if "cumulative_logprob" in wanted else None,
        ),
        n=1 if given.n is None else bounded(given.n, "n", 1, _MAX_N),
        stop=stop_strings(given.stop),
        include_stop_str_in_output=bool(given.include_stop_str_in_output),
        skip_special_tokens=given.skip_special_tokens is not False,
        priority=priority_level(given.priority if given.priority is not None else request.priority, policy),
        tenant=request.tenant,
        timeout=timeout,
    )
    prefix = "" if stream or excluded else prompt
    return TextRequest(generate, stream, prefix, wanted, asks_logprobs, given.lora_name)


def _parameters(request: InferRequest) -> SamplingParameters:
    """The tensor's JSON if there is one, else the request's parameters, whose values may be strings."""
    given = text(request, "sampling_parameters")
    if given is None:
        return sampling_fields(request.parameters, SamplingParameters)
    body = given.encode() or b"{}"
    if len(body) > _MAX_SAMPLING_BYTES:
        raise InvalidRequestError(f"sampling_parameters: they are longer than {_MAX_SAMPLING_BYTES} bytes")
    try:
        check_json(body)
        fields = decode_json(body, dict[str, Any])
    except PenstockError as error:
        raise InvalidRequestError(f"sampling_parameters: {error.message}", param=error.param) from None
    return sampling_fields(fields, SamplingParameters)


def sampling_fields(given: Mapping[str, Any], kind: type[_Fields]) -> _Fields:
    """Values may be strings. Raises UnsupportedError for a name that `kind` does not have, InvalidRequestError."""
    try:
        return msgspec.convert({name: _typed(name, value) for name, value in given.items()}, kind)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at `$.")
        name = where.rstrip("`") or None
        if problem.startswith("Object contains unknown field"):
            raise UnsupportedError(
                f"The sampling parameter{problem.removeprefix('Object contains unknown field')} is not supported."
            ) from None
        raise InvalidRequestError(f"{name or 'sampling parameters'}: {problem}.", param=name) from None


_KINDS = {
    **dict.fromkeys(("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs", "priority"), int),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"), float
    ),
}
_BOOLS = {"true": True, "1": True, "false": False, "0": False}


def _typed(name: str, value: object) -> object:
    """Triton's clients send parameters as strings, too: "0.5" for a temperature, "true" for a flag."""
    if not isinstance(value, str):
        return value
    kind = _KINDS.get(name)
    if kind is not None:
        try:
            return kind(value)
        except ValueError:
            return value
    return _BOOLS.get(value.lower(), value) if name.startswith(("ignore", "include", "skip")) else value
