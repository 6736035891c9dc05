"""Our sampling parameters in vLLM's words."""

from __future__ import annotations

from typing import Any

from vllm.sampling_params import SamplingParams as VLLMSamplingParams

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.vllm.requests import is_random

_SEED_MASK = (1 << 63) - 1
"""Seeds are signed 64-bit numbers there."""


def to_vllm(
    params: SamplingParams, eos_token_ids: tuple[int, ...], seed: int | None, score_prompt: bool
) -> VLLMSamplingParams:
    """One to one. Raises ValueError for what vLLM does not take.

    Stopping is our scheduler's affair: vLLM knows the stop tokens only in order to hold them back for `min_tokens`.
    `seed`: None where random numbers are seeded for each token (`worker.WorkerExtension`).
    """
    stop = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    extra: dict[str, Any] = {}
    if params.logit_bias:
        extra["logit_bias"] = params.logit_bias
    if score_prompt:
        extra["prompt_logprobs"] = params.prompt_logprobs
    return VLLMSamplingParams(
        temperature=params.temperature if is_random(params) else 0.0,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=None if seed is None or not is_random(params) else seed & _SEED_MASK,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop_token_ids=sorted(stop),
        ignore_eos=True,
        logprobs=params.logprobs,
        detokenize=False,
        **extra,
    )
