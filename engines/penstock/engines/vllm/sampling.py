"""Our sampling parameters and grammars in vLLM's words."""

from __future__ import annotations

import json
from typing import Any

from vllm.sampling_params import SamplingParams as VLLMSamplingParams
from vllm.sampling_params import StructuredOutputsParams

from penstock.engines.contract.messages import Grammar, SamplingParams
from penstock.engines.errors import UnsupportedError
from penstock.engines.kit.sampling.uniform import stream_key
from penstock.engines.vllm.worker import RANDOM_KEY
from penstock.tokenizers import lark
from penstock.tokenizers.grammars.schemas import with_exact_numbers
from penstock.tokenizers.schema_bounds import check_schema_bounds

_SEED_MASK = (1 << 63) - 1
"""Seeds are signed 64-bit numbers there."""
_NOT_HANDED_ON = ("processors", "prediction")


def to_vllm(
    params: SamplingParams,
    eos_token_ids: tuple[int, ...],
    seed: int | None,
    score_prompt: bool,
    draws_by_position: bool,
) -> VLLMSamplingParams:
    """One to one. Raises ValueError for what vLLM does not take, UnsupportedError for what is not handed on.

    Stopping is our scheduler's affair: vLLM knows the stop tokens only in order to hold them back for `min_tokens`.
    `draws_by_position`: vLLM's workers make each random number from seed and position by themselves; where they do not,
    `worker.WorkerExtension` does, and finds the seed's key beside the parameters.
    """
    for name in _NOT_HANDED_ON:
        if getattr(params, name):
            raise UnsupportedError(f"{name} is not supported by this model's engine: vLLM does not get it.", param=name)
    if params.grammar is not None and params.grammar.kind != "text" and params.min_tokens:
        raise ValueError("min_tokens: not beside structured output with vLLM, which might have no token left.")
    stop = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    extra: dict[str, Any] = {}
    if seed is not None and params.is_random:
        extra |= {"seed": seed & _SEED_MASK} if draws_by_position else {"extra_args": {RANDOM_KEY: stream_key(seed)}}
    if params.logit_bias:
        extra["logit_bias"] = params.logit_bias
    if params.allowed_token_ids is not None:
        extra["allowed_token_ids"] = list(params.allowed_token_ids)
    if score_prompt:
        extra["prompt_logprobs"] = params.prompt_logprobs
    theirs = VLLMSamplingParams(
        temperature=params.temperature if params.is_random else 0.0,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
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
    if params.bad_words:
        # vLLM makes these of the words' texts, in its front
        theirs._bad_words_token_ids = [list(word) for word in params.bad_words]
    return theirs


CONFIG = {"backend": "guidance"}
"""`structured_outputs_config`. It refuses schemas that it cannot keep; vLLM's default takes some of them anyway."""


def to_structured_outputs(grammar: Grammar, backend: str) -> StructuredOutputsParams:
    """`backend`: that of `structured_outputs_config`. Raises UnsupportedError where there are thoughts: vLLM would need
    a parser of its own for them. Raises ValueError for a schema that would take too much (`check_schema_bounds`), or
    has numbers that cannot be kept."""
    if grammar.thought is not None or grammar.preface or grammar.budget is not None:
        message = "Structured output behind a thought, and bounds of thoughts, need Penstock's scheduler."
        raise UnsupportedError(message)
    check_schema_bounds(grammar.kind, grammar.text)
    if backend == CONFIG["backend"]:
        return StructuredOutputsParams(**_one_of(*with_exact_numbers(grammar.kind, grammar.text)))
    return StructuredOutputsParams(**_one_of(grammar.kind, grammar.text))


def _one_of(kind: str, text: str) -> dict[str, Any]:
    if kind == "json_schema":
        return {"json": json.dumps(lark.guided_schema(json.loads(text)))}
    if kind == "choice":
        return {"choice": json.loads(text)}
    return {kind: text}
