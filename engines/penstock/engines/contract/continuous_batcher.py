"""The seam of engines that schedule by themselves: what the admission queue hands over, and what it gets back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.engines.contract.messages import FinishReason, SamplingParams, TokenLogprobs
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import PenstockError


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
    """What one request got from one step."""

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
    """Aborted requests that hold no seat and no blocks any more. A request that had a finish reason in `tokens`, before
    the abort or after it, need not be listed."""
    num_scheduled_tokens: int = 0
    """Computed in this step, prompts and outputs together; 0 where the engine does not say."""
    num_preemptions: int = 0
    """In this step."""


class ContinuousBatcher(Protocol):
    """An engine with a scheduler and a KV cache of its own: vLLM's core, TensorRT-LLM.

    It is handed requests only when it can run them now (`engines.autonomous`): which requests wait, how long and in
    which order is decided before, by the same policies as for model runners.
    """

    @property
    def info(self) -> ModelInfo: ...

    @property
    def wakeup(self) -> int | None:
        """A file descriptor that is readable while `step` has something to return, for an engine that runs by itself.
        None for one that advances only within `step`."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks of `info.block_size` tokens that new requests could have, cached ones that can be evicted included."""
        ...

    def start(self, request: StartRequest) -> None:
        """Hands a request over. A PenstockError or ValueError ends this request alone."""
        ...

    def abort(self, ids: Sequence[int]) -> None:
        """Aborts requests. They count as running until `step` reports them in `released`."""
        ...

    def step(self) -> BatcherOutput:
        """What has come since the last call; an engine that advances only here makes one iteration. An exception means
        that the engine cannot continue: its process ends."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forgets all computed prompts. Raises UnsupportedError for an engine that cannot, OverloadedError for one that
        cannot while requests run."""
        ...

    def close(self) -> None: ...
