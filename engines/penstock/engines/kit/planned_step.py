"""A step of the runner kit, from its planning to its answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.engines.contract.step import ModelRunnerOutput
from penstock.engines.kit.batch import NO_INTS, Batch, Ints
from penstock.engines.kit.sampling import Extension, SamplingState


@dataclass(slots=True)
class PlannedBatch:
    """A batch, and what its outputs are for. Rows of the logits: one for each of `sampling`; then 1 + len(draft) for
    each of `verifying`; then those of `pooling`; then the prompt positions."""

    batch: Batch
    indices: Ints
    """[S]: of its requests in the step."""
    rows: Ints
    """[S]: of the request table."""
    sampling: Ints
    """[n]: which of its requests get one token, from the logits of their last one."""
    sampling_rows: Ints
    """[n]: of the request table."""
    places: Ints
    """[n]: the position of that token."""
    states: list[SamplingState | None]
    """[n]"""
    late: Ints
    """[L]: indices of the tokens that a step under way may still have to sample; either one of every request in
    `sampling`, or none."""
    late_places: Ints
    """[L]: the positions of those tokens."""
    verifying: list[int]
    """Which requests have guesses."""
    drafts: list[list[int]]
    """The guesses of each of `verifying`."""
    pooling: list[int]
    """Which requests get a vector."""
    forced: dict[int, list[int]]
    """Tokens that come before the sampled one, by their place in `sampling`."""
    prompts: list[tuple[int, int, int]]
    """(request, first position, count) of prompt positions whose successor is a prompt token."""
    sampled: Ints = field(default_factory=lambda: NO_INTS)
    """[n]: -1 where the logits are not finite."""
    verified: list[Extension] = field(default_factory=list)
    """Of each of `verifying`."""

    @property
    def only_decodes(self) -> bool:
        """Each request of the step gets its next token, and nothing else is computed."""
        return len(self.sampling) == len(self.indices) == len(self.batch.positions)


@dataclass(slots=True)
class PlannedStep:
    request_ids: list[int]
    copies: list[tuple[int, int]]
    buffer: int
    batches: list[PlannedBatch]
    """Computed one after the other, in the same buffer. The first is prepared when the step is submitted."""
    output: ModelRunnerOutput
    forced: dict[int, list[int]]
    """`SchedulerOutput.forced`"""
    failure: Exception | None = None
    """It could not be begun, which is told when it is collected: another step's result may be there first."""
