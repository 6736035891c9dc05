"""`sequence_batching` of a configuration, as numbers."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.classic.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class SequenceSettings:
    model: str
    oldest: bool
    """The strategy: oldest, or else direct."""
    slots: int
    """Sequences that one instance works on at the same time."""
    max_batch_size: int
    """At least 1."""
    idle_ns: int
    """How long a sequence may be without a request before it ends."""
    delay_ns: int
    minimum_slot_utilization: float
    """direct: the part of the slots that must have a request for a batch to go before the delay is over."""
    iterative: bool

    @staticmethod
    def of(config: ModelConfig) -> SequenceSettings:
        """Of a configuration with `sequence_batching`, which has been checked and completed."""
        batching = config.sequence_batching
        oldest = batching.HasField("oldest")
        size = max(1, config.max_batch_size)
        strategy = batching.oldest if oldest else batching.direct
        return SequenceSettings(
            model=config.name,
            oldest=oldest,
            slots=(batching.oldest.max_candidate_sequences if oldest else 0) or size,
            max_batch_size=size,
            idle_ns=(batching.max_sequence_idle_microseconds or 1_000_000) * 1000,
            delay_ns=strategy.max_queue_delay_microseconds * 1000,
            minimum_slot_utilization=batching.direct.minimum_slot_utilization,
            iterative=batching.iterative_sequence,
        )
