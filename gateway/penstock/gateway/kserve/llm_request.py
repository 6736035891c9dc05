"""What a KServe client may ask a language model: the tensors and parameters of Triton's vLLM backend.

Source: triton-inference-server/vllm_backend, src/model.py and docs/additional_outputs.md. Left out are `image` and
`embedding_request`, which no engine here serves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.engines.classic.messages import InferRequest
from penstock.engines.classic.model_config import ModelConfig, datatype_value
from penstock.engines.errors import InvalidRequestError, PenstockError, UnsupportedError
from penstock.gateway.generation import GenerateRequest
from penstock.gateway.http.json_body import check_json, decode_json
from penstock.gateway.models import ServedModel
from penstock.gateway.sampling import SamplingFields, bounded, priority_level, sampling_params, stop_strings

_INPUTS = {"text_input": "BYTES", "stream": "BOOL", "sampling_parameters": "BYTES", "exclude_input_in_output": "BOOL"}
_RETURNS = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
"""Outputs that come when `return_<name>` is true, or when the client names them."""
_OUTPUTS = {
    "text_output": ("BYTES", -1),
    "finish_reason": ("BYTES", -1),
    "cumulative_logprob": ("FP32", -1),
    "logprobs": ("BYTES", -1),
    "num_input_tokens": ("UINT32", 1),
    "num_output_tokens": ("UINT32", -1),
}
_MAX_N = 128
_MAX_LOGPROBS = 20
_MAX_TOKENS = 2**31 - 1
_MAX_SAMPLING_BYTES = 1 << 20
_DEFAULT_MAX_TOKENS = 16
"""vLLM's default, which users of its Triton backend know."""


class SamplingParameters(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """The JSON object in `sampling_parameters`, or the request's parameters: names of vLLM's SamplingParams."""

    logprobs: int | None = None
    priority: int | None = None
    lora_name: str | None = None


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request as the model reads it."""

    generate: GenerateRequest
    stream: bool
    prefix: str
    """Stands before the text of each choice: the prompt, unless it is to be left out."""
    returns: frozenset[str]
    """Which outputs beside `text_output` are wanted."""
    logprobs: bool
    """The caller asked for logprobs in the sampling parameters, not only for their sum."""
    adapter: str | None
    """Name of the model's adapter that shall be used."""


def llm_config(name: str) -> ModelConfig:
    """The configuration that every language model shows."""
    config = ModelConfig(name=name, backend="penstock")
    optional = {f"return_{output}": "BOOL" for output in _RETURNS}
    for field, datatype in (_INPUTS | optional).items():
        config.input.add(name=field, data_type=datatype_value(datatype), dims=[1], optional=field != "text_input")
    for field, (datatype, dim) in _OUTPUTS.items():
        config.output.add(name=field, data_type=datatype_value(datatype), dims=[dim])
    config.version_policy.latest.num_versions = 1
    config.model_transaction_policy.decoupled = True
    return config


def read_request(request: InferRequest, model: ServedModel, policy: str, timeout: float | None) -> TextRequest:
    """Raises InvalidRequestError, UnsupportedError."""
    prompt = _text(request, "text_input")
    if prompt is None:
        raise InvalidRequestError("input 'text_input' is missing")
    stream = _flag(request, "stream") or False
    excluded = _flag(request, "exclude_input_in_output")
    if stream and excluded is False:
        raise InvalidRequestError("When streaming, exclude_input_in_output = false is not allowed.")
    wanted = frozenset(name for name in _RETURNS if _flag(request, f"return_{name}") or name in request.outputs)
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


def _text(request: InferRequest, name: str) -> str | None:
    tensor = request.inputs.get(name)
    if tensor is None:
        return None
    try:
        return bytes(tensor.array.item()).decode()
    except UnicodeDecodeError:
        raise InvalidRequestError(f"input '{name}' is not valid UTF-8") from None


def _flag(request: InferRequest, name: str) -> bool | None:
    tensor = request.inputs.get(name)
    return None if tensor is None else bool(tensor.array.item())


def _parameters(request: InferRequest) -> SamplingParameters:
    """The tensor's JSON if there is one, else the request's parameters, whose values may be strings."""
    text = _text(request, "sampling_parameters")
    if text is None:
        return _converted(request.parameters)
    body = text.encode() or b"{}"
    if len(body) > _MAX_SAMPLING_BYTES:
        raise InvalidRequestError(f"sampling_parameters: they are longer than {_MAX_SAMPLING_BYTES} bytes")
    try:
        check_json(body)
        given = decode_json(body, dict[str, Any])
    except PenstockError as error:
        raise InvalidRequestError(f"sampling_parameters: {error.message}", param=error.param) from None
    return _converted(given)


def _converted(given: Mapping[str, Any]) -> SamplingParameters:
    try:
        return msgspec.convert({name: _typed(name, value) for name, value in given.items()}, SamplingParameters)
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
