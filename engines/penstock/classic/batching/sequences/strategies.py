"""The strategies of a sequence batcher: which sequences of an instance have their next request in its next batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.classic.batching.batch import CallSequence, SequenceSlot
from penstock.classic.batching.queue import DynamicBatcher, QueueEntry
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


class SlotStrategy(Protocol):
    """Knows the first waiting request of every sequence that has a slot and none that is executed now."""

    delay_ends: int
    """When the batch goes that `take` has not given yet; 0: there is none."""

    def ready(self, sequence: CallSequence, shapes: object, now_ns: int) -> None:
        """Its first request can be executed. `shapes` are what requests of a batch have in common."""
        ...

    def withdraw(self, sequence: CallSequence) -> None:
        """Its first request, if it was ready, must not be executed."""
        ...

    def due(self, instance: int, now_ns: int) -> bool:
        """Whether `take` would give a batch."""
        ...

    def take(self, instance: int, now_ns: int) -> list[CallSequence | None]:
        """Those whose first request is in the next batch; None is a slot to be padded. They are withdrawn."""
        ...


class ReadySequence(QueueEntry):
    """A sequence whose first request can be executed."""

    __slots__ = ("sequence",)

    def __init__(self, sequence: CallSequence, shapes: object, now_ns: int) -> None:
        super().__init__()
        self.sequence = sequence
        self.shapes = shapes
        self.arrived_ns = now_ns


class Direct:
    """A sequence's request has the place in the batch that is its sequence's slot. Between them the batch is padded."""

    def __init__(self, settings: SequenceSettings, slots: list[list[SequenceSlot]]) -> None:
        self._settings = settings
        self._slots = slots
        self._ready: list[dict[CallSequence, ReadySequence]] = [{} for _ in slots]
        """Of each instance, in the order in which they became ready."""
        self.delay_ends = 0

    def ready(self, sequence: CallSequence, shapes: object, now_ns: int) -> None:
        assert sequence.slot is not None
        self._ready[sequence.slot.instance][sequence] = ReadySequence(sequence, shapes, now_ns)

    def withdraw(self, sequence: CallSequence) -> None:
        if sequence.slot is not None:
            self._ready[sequence.slot.instance].pop(sequence, None)

    def due(self, instance: int, now_ns: int) -> bool:
        self.delay_ends = 0
        ready = self._ready[instance]
        if not ready:
            return False
        settings = self._settings
        if settings.delay_ns and settings.minimum_slot_utilization:
            oldest = next(iter(ready.values()))
            used = len(ready) / settings.slots
            if used < settings.minimum_slot_utilization and now_ns < oldest.arrived_ns + settings.delay_ns:
                self.delay_ends = oldest.arrived_ns + settings.delay_ns
                return False
        return True

    def take(self, instance: int, now_ns: int) -> list[CallSequence | None]:
        if not self.due(instance, now_ns):
            return []
        ready = self._ready[instance]
        oldest = next(iter(ready.values()))
        # Those that cannot share a batch with the one that has waited longest go in a later one.
        indexes = {
            one.sequence.slot.index: one.sequence
            for one in ready.values()
            if one.sequence.slot is not None and one.shapes == oldest.shapes
        }
        for sequence in indexes.values():
            del ready[sequence]
        return [indexes.get(index) for index in range(max(indexes) + 1)]


class Oldest:
    """As many sequences as a batch can have, those that have waited longest: a dynamic batcher for each instance."""

    def __init__(self, config: ModelConfig, slots: list[list[SequenceSlot]]) -> None:
        oldest = config.sequence_batching.oldest
        dynamic = ModelConfig(max_batch_size=config.max_batch_size)
        dynamic.dynamic_batching.preferred_batch_size.extend(oldest.preferred_batch_size)
        dynamic.dynamic_batching.max_queue_delay_microseconds = oldest.max_queue_delay_microseconds
        self._batchers: list[DynamicBatcher[ReadySequence]] = [DynamicBatcher(dynamic) for _ in slots]
        self._ready: dict[CallSequence, ReadySequence] = {}
        self.delay_ends = 0

    def ready(self, sequence: CallSequence, shapes: object, now_ns: int) -> None:
        assert sequence.slot is not None
        ready = self._ready[sequence] = ReadySequence(sequence, shapes, now_ns)
        self._batchers[sequence.slot.instance].add(ready, now_ns)

    def withdraw(self, sequence: CallSequence) -> None:
        ready = self._ready.pop(sequence, None)
        if ready is not None and sequence.slot is not None:
            self._batchers[sequence.slot.instance].remove(ready)

    def due(self, instance: int, now_ns: int) -> bool:
        return self._batchers[instance].due(now_ns)

    def take(self, instance: int, now_ns: int) -> list[CallSequence | None]:
        batcher = self._batchers[instance]
        sequences = [ready.sequence for ready in batcher.take(now_ns)]
        self.delay_ends = batcher.delay_ends if batcher and not sequences else 0
        for sequence in sequences:
            del self._ready[sequence]
        return list(sequences)
