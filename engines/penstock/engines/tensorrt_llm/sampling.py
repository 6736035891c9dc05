"""Our sampling parameters in TensorRT-LLM's words. What its sampler would ignore in silence is refused by name.

1.2 has two samplers (its argument `sampler_type`). TorchSampler, the default, knows temperature, top_p, top_k, bias and
logprobs, and reads none of the other parameters (its `_request_get_sampling_params`; NVIDIA/TensorRT-LLM issue 9442);
its min_tokens counts the prompt (pull request 12166). TRTLLMSampler knows all but the logprobs of other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from penstock.engines.contract.continuous_batcher import StartRequest
from penstock.engines.contract.messages import Grammar, SamplingParams
from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.tokenizers import lark
from penstock.tokenizers.grammars.schemas import with_exact_numbers
from penstock.tokenizers.schema_bounds import check_schema_bounds

TRTLLM_SAMPLER = "TRTLLMSampler"

_SEED_MASK = (1 << 63) - 1
_ONLY_TRTLLM = {
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
}
"""What only TRTLLMSampler heeds, and the values that ask for nothing."""
_NOT_HANDED_ON = ("allowed_token_ids", "bad_words", "processors", "prediction")


def sampling_arguments(request: StartRequest, stops: Sequence[int], sampler: str) -> dict[str, Any]:
    """Arguments of TensorRT-LLM's SamplingParams, but for the bias (`bias`). `stops`: of `stop_tokens`.

    Raises UnsupportedError.
    """
    params = request.params
    _check_supported(request, sampler)
    end_id, *more_stops = stops or (-1,)
    arguments: dict[str, Any] = {
        "end_id": end_id,  # -1: no token is the end
        "pad_id": max(end_id, 0),
        "stop_token_ids": more_stops or None,
        "include_stop_str_in_output": True,  # the token that ended it is one of ours, too
        "max_tokens": params.max_tokens,
        "detokenize": False,
    }
    arguments |= _distribution(request) if params.is_random else {"top_k": 1}
    if sampler == TRTLLM_SAMPLER:
        arguments |= {
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
            "repetition_penalty": params.repetition_penalty,
        }
        if params.min_tokens and stops:
            if more_stops:
                reason = f"with {len(stops)} tokens that end it: TensorRT-LLM holds only one of them back"
                _refuse("min_tokens", params.min_tokens, reason)
            arguments["min_tokens"] = params.min_tokens
    if params.logprobs is not None:
        arguments["logprobs"] = max(params.logprobs, 1)  # 0 means none at all
    return arguments


def bias(logit_bias: dict[int, float], vocab_size: int) -> Any:
    """As a float32 tensor [vocab_size]; None without one. Raises InvalidRequestError for a token that is none."""
    if not logit_bias:
        return None
    import torch

    wrong = [token for token in logit_bias if not 0 <= token < vocab_size]
    if wrong:
        raise InvalidRequestError(f"logit_bias: {wrong[0]} is not a token of the model", param="logit_bias")
    tensor = torch.zeros(vocab_size, dtype=torch.float32)
    tensor[list(logit_bias)] = torch.tensor(list(logit_bias.values()), dtype=torch.float32)
    return tensor


def _distribution(request: StartRequest) -> dict[str, Any]:
    params = request.params
    arguments: dict[str, Any] = {"temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k}
    if params.min_p:
        arguments["min_p"] = params.min_p
    if request.seed is not None:
        arguments["seed"] = request.seed & _SEED_MASK
    return arguments


def _check_supported(request: StartRequest, sampler: str) -> None:
    params = request.params
    for name in _NOT_HANDED_ON:
        if getattr(params, name):
            _refuse(name, "...", "TensorRT-LLM does not get it")
    if params.prompt_logprobs is not None:
        reason = "TensorRT-LLM scores the likeliest tokens at each place of a prompt, not the prompt's own"
        _refuse("prompt_logprobs", params.prompt_logprobs, reason)
    if sampler == TRTLLM_SAMPLER:
        if params.logprobs is not None:
            _refuse("logprobs", params.logprobs, f"{TRTLLM_SAMPLER} does not rank tokens")
        return
    unknown = [name for name, neutral in _ONLY_TRTLLM.items() if getattr(params, name) != neutral]
    if request.seed is not None and params.is_random:
        unknown.append("seed")
    if unknown:
        way_out = f'engine_args {{"sampler_type": "{TRTLLM_SAMPLER}"}}'
        reason = f"TensorRT-LLM's default sampler ignores it; the other one does not: {way_out}"
        _refuse(unknown[0], getattr(params, unknown[0]), reason)


def _refuse(name: str, value: object, reason: str) -> None:
    raise UnsupportedError(f"{name}={value} is not supported by this model's engine: {reason}.", param=name)


def stop_tokens(params: SamplingParams, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
    """What ends a request, each once. The first one is TensorRT-LLM's `end_id`."""
    return tuple(dict.fromkeys((*(() if params.ignore_eos else eos_token_ids), *params.stop_token_ids)))


BACKEND = "guided_decoding_backend"
"""The argument of the LLM that names what compiles grammars: "llguidance" or "xgrammar"."""


def guide(grammar: Grammar, backend: str) -> dict[str, Any]:
    """Arguments of GuidedDecodingParams. A grammar of the caller's goes on as it is: Lark for llguidance, EBNF for
    xgrammar. Raises UnsupportedError for an answer behind a thought, which TensorRT-LLM cannot tell from it, ValueError
    for a schema that would take too much (`check_schema_bounds`), or has numbers that cannot be kept."""
    if grammar.thought is not None or grammar.preface or grammar.budget is not None:
        message = "Structured output behind a thought, and bounds of thoughts, are not supported with TensorRT-LLM."
        raise UnsupportedError(message)
    check_schema_bounds(grammar.kind, grammar.text)
    is_lark = backend == "llguidance"
    kind, text = with_exact_numbers(grammar.kind, grammar.text) if is_lark else (grammar.kind, grammar.text)
    if kind == "json_schema":
        schema = json.loads(text)
        return {"json": json.dumps(lark.guided_schema(schema) if is_lark else schema)}
    if kind == "choice":
        start = "start:" if is_lark else "root ::="
        return {"grammar": f"{start} {' | '.join(json.dumps(choice) for choice in json.loads(text))}"}
    return {kind: text}
