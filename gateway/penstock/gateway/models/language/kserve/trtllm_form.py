"""The tensors of NVIDIA's Triton backend over TensorRT-LLM's LLM API.

Source: NVIDIA/TensorRT-LLM, triton_backend/all_models/llmapi/tensorrt_llm (config.pbtxt, 1/model.py, 1/helpers.py) and
tensorrt_llm/sampling_params.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.classic.messages import InferRequest
from penstock.classic.tensors import Tensor
from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.models.language.choice_output import ChoiceDelta
from penstock.gateway.models.language.kserve.tensor_form import (
    Form,
    TextRequest,
    decoded,
    flag,
    generate_request,
    requested_outputs,
    sampling_fields,
    scalar,
    strings,
    text,
)
from penstock.gateway.models.language.kserve.vllm_form import add_logprobs
from penstock.gateway.models.language.models import ServedModel
from penstock.gateway.models.language.sampling import SamplingFields, priority_level
from penstock.gateway.models.language.structured_output import StructuredOutputs

_SAMPLING = {
    "best_of": "INT32",
    "temperature": "FP32",
    "top_k": "INT32",
    "top_p": "FP32",
    "frequency_penalty": "FP32",
    "presence_penalty": "FP32",
    "max_tokens": "INT32",
    "seed": "UINT64",
    "exclude_input_from_output": "BOOL",
    "return_perf_metrics": "BOOL",
}
"""Inputs `sampling_param_<name>`."""
_RETURNS = ("finish_reason", "stop_reason", "cumulative_logprob")
_INPUTS = {
    "text_input": ("BYTES", -1),
    "streaming": ("BOOL", 1),
    **{f"sampling_param_{name}": (datatype, 1) for name, datatype in _SAMPLING.items()},
    "sampling_param_stop": ("BYTES", -1),
    "guided_decoding_guide_type": ("BYTES", 1),
    "guided_decoding_guide": ("BYTES", 1),
    **{f"return_{output}": ("BOOL", 1) for output in _RETURNS},
    "stop": ("BOOL", 1),
    "lora_name": ("BYTES", 1),
}
_OUTPUTS = {
    "text_output": ("BYTES", -1),
    "finish_reason": ("BYTES", -1),
    "stop_reason": ("BYTES", -1),
    "cumulative_logprob": ("FP32", -1),
}
_NO_FILES = "requests choose among the adapters that the operator has loaded, by lora_name, and name no files"
_NO_METRICS = "responses carry no metrics; the server's metrics port has them"
_UNSERVED = {
    "image_url": "models of this backend read text only here",
    "sampling_param_logits_post_processor_name": "requests cannot choose code",
    **dict.fromkeys(("lora_id", "lora_path", "lora_ckpt_source"), _NO_FILES),
    **dict.fromkeys(
        (
            *("kv_cache_reused_block", "kv_cache_missed_block", "kv_cache_alloc_new_blocks"),
            *("kv_cache_alloc_total_blocks", "kv_cache_hit_rate", "arrival_time_ns", "first_scheduled_time_ns"),
            *("first_token_time_ns", "last_token_time_ns", "acceptance_rate", "total_accepted_draft_tokens"),
            "total_draft_tokens",
        ),
        _NO_METRICS,
    ),
}
_GUIDE_TYPE, _GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"
_GUIDES = {"json": "json", "json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}
"""Types of guides, and the field of StructuredOutputs that says the same."""
_DEFAULT_MAX_TOKENS = 32
"""Of TensorRT-LLM's SamplingParams."""


class Sampling(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """From the inputs `sampling_param_*`, or, where one is silent, the request's parameter of that name without the
    prefix: NVIDIA's documentation writes "max_tokens" in a generate request."""

    guided_decoding_guide_type: str | None = None
    guided_decoding_guide: str | None = None
    best_of: int | None = None
    exclude_input_from_output: bool | None = None
    return_perf_metrics: bool | None = None


def read_request(request: InferRequest, model: ServedModel, policy: str) -> TextRequest:
    """Raises InvalidRequestError, UnsupportedError."""
    prompt = text(request, "text_input")
    if prompt is None:
        raise InvalidRequestError("text_input is missing from the request")
    stream = flag(request, "streaming") or False
    sampling = _sampling(request)
    returns = requested_outputs(request, _RETURNS)
    generate = generate_request(
        request,
        model,
        sampling,
        prompt,
        model_defaults={},
        default_max_tokens=_DEFAULT_MAX_TOKENS,
        logprobs=0 if "cumulative_logprob" in returns else None,
        priority=priority_level(request.priority, policy),
    )
    prefix = "" if stream or sampling.exclude_input_from_output else prompt
    return TextRequest(generate, stream, prefix, returns, False, text(request, "lora_name"))


def _sampling(request: InferRequest) -> Sampling:
    sampling = sampling_fields(request.parameters, Sampling)
    for name in _SAMPLING:
        value = scalar(request, f"sampling_param_{name}")
        if value is not None:
            setattr(sampling, name, value)
    stop = request.inputs.get("sampling_param_stop")
    if stop is not None:
        sampling.stop = [decoded(item, "sampling_param_stop") for item in stop.array.flat]
    for name in (_GUIDE_TYPE, _GUIDE):
        value = text(request, name)
        if value is not None:
            setattr(sampling, name, value)
    if sampling.guided_decoding_guide_type or sampling.guided_decoding_guide:
        _take_guide(sampling)
    if sampling.best_of not in (None, 1):
        raise UnsupportedError("best_of must be 1: there is no beam search.", param="best_of")
    if sampling.return_perf_metrics:
        raise UnsupportedError(f"return_perf_metrics is not supported: {_NO_METRICS}.", param="return_perf_metrics")
    if sampling.seed is not None and sampling.seed > 2**63 - 1:
        sampling.seed -= 2**64  # UINT64 here, INT64 in the engines: the same 64 bits
    if _is_greedy(sampling):
        sampling.temperature, sampling.top_p, sampling.top_k = 0.0, None, None
    return sampling


def _take_guide(sampling: Sampling) -> None:
    """What NVIDIA's older backend (inflight_batcher_llm) calls a guide is a structured output here."""
    kind, guide = sampling.guided_decoding_guide_type, sampling.guided_decoding_guide
    if kind not in _GUIDES:
        raise InvalidRequestError(f"{_GUIDE_TYPE} must be one of {', '.join(_GUIDES)}.", param=_GUIDE_TYPE)
    if sampling.structured_outputs is not None:
        raise InvalidRequestError(f"{_GUIDE_TYPE} cannot be given beside structured_outputs.", param=_GUIDE_TYPE)
    if kind == "json":
        sampling.structured_outputs = StructuredOutputs(json=True)
    elif not guide:
        raise InvalidRequestError(f"{_GUIDE} is missing for {_GUIDE_TYPE} {kind}.", param=_GUIDE)
    else:
        sampling.structured_outputs = msgspec.convert({_GUIDES[kind]: guide}, StructuredOutputs)


def _is_greedy(sampling: Sampling) -> bool:
    """TensorRT-LLM's rule: a request that says nothing about sampling is greedy, whatever the model's own defaults."""
    silent = sampling.temperature is None and sampling.top_k is None and sampling.top_p is None
    return silent or sampling.temperature == 0 or sampling.top_k == 1 or sampling.top_p == 0


class TrtllmWriter:
    """As NVIDIA's backend does it, each response of a stream has the whole text so far, not what is new."""

    def __init__(self, request: TextRequest) -> None:
        self._returns = request.returns
        self._texts = [request.prefix] * request.generate.n
        self._sums = [0.0] * request.generate.n
        self._finish_reasons = ["None"] * request.generate.n
        self._stop_reasons = ["None"] * request.generate.n

    def tensors(self, deltas: Sequence[ChoiceDelta | None], prompt_tokens: int) -> list[Tensor]:
        for index, delta in enumerate(deltas):
            if delta is not None:
                self._texts[index] += delta.text
                self._finish_reasons[index] = str(delta.finish_reason)
                self._stop_reasons[index] = str(delta.stop_reason)
        add_logprobs(self._sums, deltas)
        tensors = [strings("text_output", self._texts)]
        if "finish_reason" in self._returns:
            tensors.append(strings("finish_reason", self._finish_reasons))
        if "stop_reason" in self._returns:
            tensors.append(strings("stop_reason", self._stop_reasons))
        if "cumulative_logprob" in self._returns:
            tensors.append(Tensor("cumulative_logprob", "FP32", np.array(self._sums, np.float32)))
        return tensors


def _cancels(request: InferRequest) -> bool:
    return bool(flag(request, "stop"))


TRTLLM_FORM = Form(_INPUTS, _OUTPUTS, _UNSERVED, read_request, TrtllmWriter, _cancels)
