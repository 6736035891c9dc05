"""What the admission queue hands to a batcher, and what it gets back."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.engines.errors import PenstockError
from penstock.engines.messages import FinishReason, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class StartRequest:
    """One sample that runs from now on."""

    id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int | None
    """Of this sample; None: the caller did not ask for one."""
    priority: int = 0
    cache_salt: str = ""
    """Prefix-cache entries are shared only among equal salts."""
    adapter: str = ""


@dataclass(slots=True)
class NewTokens:
    """What one request has got in one step."""

    id: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    """Set once, with the last tokens; after an ERROR, `error` says which."""
    stop_token_id: int | None = None
    """As in RequestOutput."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of token_ids, when asked for."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """With the first tokens, when asked for."""
    num_cached_tokens: int = 0
    """With the first tokens: of the prompt, found in the engine's prefix cache."""
    error: PenstockError | None = None


@dataclass(slots=True)
class BatcherOutput:
    tokens: list[NewTokens] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    """Aborted requests that hold no seat and no blocks any more. One that had a finish reason in `tokens`, before the
    abort or after it, need not be listed."""
    num_scheduled_tokens: int = 0
    """Computed in this step, prompts and outputs together; 0 where the engine does not say."""
    num_preemptions: int = 0
    """In this step."""
