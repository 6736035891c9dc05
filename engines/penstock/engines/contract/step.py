"""What the scheduler asks of a runner in one step, and what the runner answers.

New requests travel whole, running ones as differences: a runner keeps, for each live request, its token ids, its block
table and its sampling parameters, from the `NewRequest` that introduced it until its id appears in `dropped_ids`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.engines.contract.messages import SamplingParams, TokenLogprobs


@dataclass(slots=True)
class NewRequest:
    """A request that the runner does not know: new, forked, or resumed after a preemption."""

    id: int
    token_ids: list[int]
    """Prompt, and for a resumed request the tokens generated so far. The runner must copy what it keeps."""
    num_prompt_tokens: int
    block_ids: list[int]
    """The block table: position p lives in block_ids[p // block_size], slot p % block_size."""
    params: SamplingParams
    seed: int
    """Always set; the random number of output token i is a pure function of (seed, i), so that preemption, batching
    and restarts of the computation cannot change it."""
    adapter: str = ""


@dataclass(slots=True)
class SchedulerOutput:
    """One step. Lists are parallel: entry i of each belongs to request_ids[i].

    A runner applies, in this order: dropped_ids, new_requests, new_block_ids, block_copies; then computes, for each
    request i, the tokens at positions [num_computed_tokens[i], num_computed_tokens[i] + num_scheduled_tokens[i]).
    Where that range reaches the request's last known token, it samples the next one.
    """

    new_requests: list[NewRequest] = field(default_factory=list)
    request_ids: list[int] = field(default_factory=list)
    num_scheduled_tokens: list[int] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)
    """Before this step."""
    new_block_ids: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    """id -> (index, block ids): the request's block table holds these from `index` on. Appends, or replaces the last
    block after a copy on write."""
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    """(source block, destination block): whole blocks, all layers, keys and values, copied before the computation."""
    dropped_ids: list[int] = field(default_factory=list)
    """Finished, aborted or preempted since the last step: the runner forgets them."""
    total_num_scheduled_tokens: int = 0


@dataclass(slots=True)
class ModelRunnerOutput:
    """Answers one SchedulerOutput."""

    sampled_token_ids: list[list[int]]
    """For each of request_ids, in order: the new tokens ([] where the prompt is not finished, [t] otherwise). The
    runner has already appended them to its own copy of the request's tokens."""
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """id -> one entry per sampled token, for requests with params.logprobs set."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """id -> entries for the prompt positions computed in this step: the logprob of prompt token p + 1, given those up
    to p, for each scheduled position p whose successor is a prompt token; for requests with params.prompt_logprobs."""
    failed: dict[int, str] = field(default_factory=dict)
    """id -> message: requests with NaN or infinite logits in this step, or with an adapter that the runner does not
    have. They sampled nothing; others are unharmed."""
