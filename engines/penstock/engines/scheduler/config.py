"""The scheduler's limits."""

from __future__ import annotations

import msgspec

from penstock.engines.scheduler.policy import Policy


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    max_num_seqs: int = 256
    """Most requests in one step."""
    max_num_batched_tokens: int = 2048
    """Most tokens in one step, prompts and decodes together. At least max_num_seqs, so that a step never leaves a
    running request out."""
    policy: Policy = Policy.FCFS
    ageing_seconds: float = 10.0
    """Policy `priority`: waiting this long is worth one level of priority."""
    max_queued_requests: int = 1024
    """Requests waiting beyond the free seats; more are refused."""
    max_queued_tokens: int = 1_048_576
    """The same in known tokens (prompts). A single request may always wait."""
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_queued_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_queued_requests < 0 or self.ageing_seconds < 0:
            raise ValueError("max_queued_requests and ageing_seconds cannot be negative")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running request needs one token of every step"
            )
