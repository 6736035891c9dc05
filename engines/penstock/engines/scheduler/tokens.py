"""Between a request and a runner: how a request is introduced, and how its sampled tokens are taken in."""

from __future__ import annotations

from collections.abc import Container

from penstock.engines.contract.messages import FinishReason, PromptInfo, RequestOutput
from penstock.engines.contract.step import ModelRunnerOutput, NewRequest
from penstock.engines.scheduler.request import Request


def introduce(request: Request) -> NewRequest:
    """All that a runner must know of a request that it has not seen, or has forgotten."""
    return NewRequest(
        id=request.id,
        token_ids=request.token_ids,
        num_prompt_tokens=request.num_prompt_tokens,
        block_ids=list(request.table.block_ids) if request.table is not None else [],
        params=request.params,
        seed=request.seed,
        adapter=request.adapter,
    )


def take_tokens(request: Request, tokens: list[int], result: ModelRunnerOutput, eos: Container[int]) -> RequestOutput:
    """Appends sampled tokens to the request, up to the one that ends it, and says what its client gets."""
    output = RequestOutput(request.id, tokens)
    if request.num_tokens == request.num_prompt_tokens:
        output.prompt = PromptInfo(
            request.num_cached_tokens,
            (request.first_scheduled or request.arrival_time) - request.arrival_time,
            request.prompt_logprobs or None,
        )
    for taken, token in enumerate(tokens, 1):
        request.token_ids.append(token)
        request.num_tokens += 1
        if token in request.stop_token_ids and request.num_tokens > request.min_num_tokens:
            output.finish_reason = FinishReason.STOP
            output.stop_token_id = None if token in eos else token
        elif request.num_tokens >= request.max_num_tokens:
            output.finish_reason = FinishReason.LENGTH
        if output.finish_reason is not None:
            output.token_ids = tokens[:taken]
            break
    if result.logprobs and request.id in result.logprobs:
        output.logprobs = result.logprobs[request.id][: len(output.token_ids)]
    return output
