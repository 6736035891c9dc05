"""Figures of an engine, which come with each of its messages."""

from __future__ import annotations

from typing import Any

import msgspec


class TierStats(msgspec.Struct, array_like=True, frozen=True):
    """The figures of a place beyond the KV cache where blocks are kept."""

    blocks: int = 0
    """That it holds."""
    bytes: int = 0
    """What they take; of shared memory, those of this engine."""
    saved: int = 0
    """Blocks that were written there."""
    dropped: int = 0
    """Evicted blocks that were not, since writing was behind, failed, or is turned off."""
    loaded: int = 0
    """Blocks that came back from there, for a request."""
    damaged: int = 0
    """Blocks in files that did not hold what they should when they were read."""
    lost: int = 0
    """Blocks in shared memory that were overwritten before they were read, or damaged."""
    missed_tokens: int = 0
    """Of prompts that another engine had computed: tokens in full blocks that had to be computed again."""
    waits: int = 0
    """Requests that waited for their blocks."""
    wait_seconds: float = 0.0
    """How long, together."""

    def when_lost(self) -> TierStats:
        """As `EngineStats.when_lost`."""
        return msgspec.structs.replace(self, **dict.fromkeys(TIER_GAUGES, 0))


TIER_GAUGES = ("blocks", "bytes")


class EngineStats(msgspec.Struct, array_like=True):
    """The engine's state after a step. Counters only grow during an engine's life; gauges are of this moment."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    """Blocks without a reference; cached ones, which can be evicted, count as free."""
    num_cached_blocks: int = 0
    admitted: int = 0
    """Samples that have arrived since the start; at idle it equals the sum of `finished`."""
    finished: dict[str, int] = {}
    """By finish reason; errors as `error:<code>`."""
    prompt_tokens: int = 0
    """Computed, prefix hits not counted."""
    generation_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Prompt tokens found there."""
    steps: int = 0
    draft_tokens: int = 0
    """Guesses that were verified (speculative decoding)."""
    accepted_tokens: int = 0
    """Of these, the ones that were right."""
    step_failures: int = 0
    """Steps that raised."""
    forced_tokens: int = 0
    """That needed no step of their own, since a grammar left no others."""
    offload: TierStats = TierStats()
    """Of the tier behind the KV cache, in files."""
    handover: TierStats = TierStats()
    """Of the memory that this engine shares with others."""
    admitted_of_others: int = 0
    """Of an engine with a door (`penstock.engines.door`): how many of `admitted` others than the reader have sent."""
    num_state_rows: int = 0
    """Of recurrent layers; 0: the model has none."""
    num_free_state_rows: int = 0
    """Rows without a reference; checkpoints in the prefix cache, which can be evicted, count as free."""

    def by_name(self) -> dict[str, Any]:
        """All of them, those of tiers as `offload_saved`."""
        figures = msgspec.structs.asdict(self)
        for tier in TIERS:
            own = msgspec.structs.asdict(figures.pop(tier))
            figures |= {f"{tier}_{name}": value for name, value in own.items()}
        return figures

    @property
    def own_admitted(self) -> int:
        """Samples that the reader of these stats has sent and the engine has taken in, or refused."""
        return self.admitted - self.admitted_of_others

    def when_lost(self) -> EngineStats:
        """The same of an engine that is out of reach: its counters are still true, its gauges and the reader's own
        samples are gone."""
        tiers = {name: getattr(self, name).when_lost() for name in TIERS}
        return msgspec.structs.replace(self, admitted_of_others=self.admitted, **dict.fromkeys(GAUGES, 0), **tiers)


GAUGES = (
    "num_running",
    "num_waiting",
    "num_waiting_tokens",
    "num_blocks",
    "num_free_blocks",
    "num_cached_blocks",
    "num_state_rows",
    "num_free_state_rows",
)
"""Fields of EngineStats that are of this moment; all others count, but for `TIERS`."""
TIERS = ("offload", "handover")
