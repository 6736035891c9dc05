"""From vLLM's ModelRunnerOutput to ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from penstock.engines.contract.messages import TokenLogprobs
from penstock.engines.contract.step import ModelRunnerOutput, SchedulerOutput
from penstock.engines.errors import EngineError, NumericalError
from penstock.engines.vllm.requests import VLLMRequestTable
from penstock.engines.vllm.step import Row

NOT_FINITE = "the model's logits are not finite"


def read_output(step: SchedulerOutput, rows: Sequence[Row], table: VLLMRequestTable, theirs: Any) -> ModelRunnerOutput:
    """`theirs` is vLLM's; its requests come in an order of its own. Appends the sampled tokens to their requests."""
    output = ModelRunnerOutput([[] for _ in step.request_ids])
    broken = theirs.num_nans_in_logits or {}
    for i, (request_id, (request, name, samples)) in enumerate(zip(step.request_ids, rows, strict=True)):
        if request.refusal is not None:
            output.failed[request_id] = request.refusal
            continue
        request.num_pending -= samples
        index = theirs.req_id_to_index[name]
        if broken.get(name):
            output.failed[request_id] = NumericalError(NOT_FINITE)
            table.taint(request)
            continue
        scored = theirs.prompt_logprobs_dict.get(name)
        if scored is not None:
            entries = token_logprobs(scored[0], scored[1], scored[2], request.params.prompt_logprobs or 0)
            output.prompt_logprobs[request_id] = entries
        if not samples:
            continue
        if request.grammar is not None and request.grammar.failure is not None:
            output.failed[request_id] = request.grammar.failure
            continue
        tokens = [int(token) for token in theirs.sampled_token_ids[index]]
        if len(tokens) != 1:
            raise EngineError(f"vLLM sampled {len(tokens)} tokens for a request that was due one")
        if request.params.logprobs is not None:
            sampled = theirs.logprobs.slice_request(index, 1)
            entries = token_logprobs(sampled[0], sampled[1], sampled[2], request.params.logprobs)
            if not math.isfinite(entries[0].logprob):
                output.failed[request_id] = NumericalError(NOT_FINITE)
                table.taint(request)
                continue
            output.logprobs[request_id] = entries
        output.sampled_token_ids[i] = tokens
        request.token_ids += tokens
    return output


def token_logprobs(token_ids: Any, logprobs: Any, ranks: Any, top: int) -> list[TokenLogprobs]:
    """Rows of vLLM's: first the token itself, then the likeliest ones, of which the batch may have asked for more."""
    return [
        TokenLogprobs(ids[0], values[0], rank, _possible(ids[1 : top + 1], values[1 : top + 1]))
        for ids, values, rank in zip(token_ids.tolist(), logprobs.tolist(), ranks.tolist(), strict=True)
    ]


def _possible(token_ids: list[int], logprobs: list[float]) -> list[tuple[int, float]]:
    """Without those that a grammar forbids: there vLLM tells of the distribution that is left."""
    return [(token_id, value) for token_id, value in zip(token_ids, logprobs, strict=True) if value > -math.inf]
