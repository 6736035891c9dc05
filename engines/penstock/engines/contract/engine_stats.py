"""The figures of an engine, which come with each of its messages."""

from __future__ import annotations

import msgspec


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
    offload_blocks: int = 0
    """Evicted blocks that the tier behind the KV cache holds."""
    offload_bytes: int = 0
    """What they take."""
    offload_saved: int = 0
    """Blocks that were written there."""
    offload_dropped: int = 0
    """Evicted blocks that were not, since writing was behind, failed, or is turned off."""
    offload_loaded: int = 0
    """Blocks that came back from there, for a request."""
    offload_damaged: int = 0
    """Blocks that did not hold what they should when they were read."""
    offload_waits: int = 0
    """Requests that waited for their blocks."""
    offload_wait_seconds: float = 0.0
    """How long, together."""
    admitted_of_others: int = 0
    """Of an engine with a door (`penstock.engines.door`): how many of `admitted` others than the reader have sent."""
    handover_bytes: int = 0
    """What blocks take that this engine has written to the memory that it shares with others."""
    handover_saved: int = 0
    """Blocks that it has written there."""
    handover_loaded: int = 0
    """Blocks that it has read there, for a request."""
    handover_lost: int = 0
    """Blocks that were overwritten before they were read, or damaged."""
    handover_missed_tokens: int = 0
    """Of prompts that another engine had computed: tokens in full blocks that had to be computed again."""
    handover_waits: int = 0
    """Requests that waited for their blocks."""
    handover_wait_seconds: float = 0.0
    """How long, together."""

    @property
    def own_admitted(self) -> int:
        """Samples that the reader of these stats has sent and the engine has taken in, or refused."""
        return self.admitted - self.admitted_of_others

    def when_lost(self) -> EngineStats:
        """The same of an engine that is out of reach: its counters are still true, its gauges and the reader's own
        samples are gone."""
        return msgspec.structs.replace(self, admitted_of_others=self.admitted, **dict.fromkeys(GAUGES, 0))


GAUGES = (
    "num_running",
    "num_waiting",
    "num_waiting_tokens",
    "num_blocks",
    "num_free_blocks",
    "num_cached_blocks",
    "offload_blocks",
    "offload_bytes",
    "handover_bytes",
)
"""Fields of EngineStats that are of this moment; all others count."""
