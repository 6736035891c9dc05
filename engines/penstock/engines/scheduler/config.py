"""The scheduler's limits."""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.engines.handover.settings import HandoverConfig
from penstock.engines.kv_events.settings import KVEventsConfig
from penstock.engines.scheduler.queues import Policy

OF_OUR_SCHEDULER = ("itl_target_ms", "steps_in_flight", "speculative", "max_draft_tokens")
"""Settings that mean nothing to an engine that schedules by itself."""


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    max_num_seqs: int = 256
    """Most requests in one step."""
    max_num_batched_tokens: int = 2048
    """Most tokens in one step, prompts and decodes together. At least max_num_seqs, so that a step never leaves a
    running request out."""
    itl_target_ms: float = 200.0
    """While requests generate, prompts get no more of a step than keeps it within this many milliseconds, by the speed
    that was measured; while none generates, within four times that. 0: always as much as max_num_batched_tokens
    allows."""
    steps_in_flight: int = 2
    """Steps that are submitted before the oldest is collected; the runner may allow fewer."""
    speculative: Literal["off", "ngram", "draft_model"] = "off"
    """ngram: the next tokens are guessed from earlier occurrences of the newest ones (prompt lookup), and verified
    several at a time. draft_model: the runner's draft model guesses. What is generated does not change."""
    max_draft_tokens: int = 8
    """Most guesses verified in one step of a request."""
    jump_ahead: bool = True
    """Tokens that a grammar leaves no choice about are computed several at a time, where that saves time."""
    policy: Policy = Policy.FCFS
    ageing_seconds: float = 10.0
    """Policy `priority`: waiting this long is worth one level of priority."""
    max_queued_requests: int = 1024
    """Requests waiting beyond the free seats; more are refused."""
    max_queued_tokens: int = 1_048_576
    """The same in known tokens (prompts). A single request may always wait."""
    enable_prefix_caching: bool = True
    kv_offload_dir: str = ""
    """Folder for the blocks that the prefix cache evicts; empty: they are lost."""
    kv_offload_bytes: int = 10 << 30
    """Most bytes of a model's blocks in it."""
    kv_events: KVEventsConfig | None = None
    """Where is published what the prefix cache stores and evicts; None: nowhere."""
    handover: HandoverConfig | None = None
    """Memory that the KV cache shares with those of other engines; None: none."""

    def __post_init__(self) -> None:
        for name in (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_queued_tokens",
            "steps_in_flight",
            "kv_offload_bytes",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("max_queued_requests", "ageing_seconds", "itl_target_ms", "max_draft_tokens"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} cannot be negative")
        if self.kv_offload_dir and not self.enable_prefix_caching:
            raise ValueError("kv-offload-dir: nothing is evicted where prefix-caching is off")
        if self.kv_events is not None and not self.enable_prefix_caching:
            raise ValueError("kv-events: nothing is stored where prefix-caching is off")
        if self.handover is not None and (self.kv_offload_dir or not self.enable_prefix_caching):
            raise ValueError("prefill-replicas: they need prefix-caching, and work without kv-offload-dir only")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): each running request needs one token of every step"
            )
