"""The admission queue over a simulated engine that is watched at the seam between them."""

from __future__ import annotations

from pathlib import Path

from penstock.engines.autonomous.core import AutonomousCore
from penstock.engines.contract.continuous_batcher import StartRequest
from penstock.engines.contract.messages import DownMessage, StepOutputs
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.simulated import SimulatedBatcher, SimulatedBatcherConfig
from unit.engines.scheduler.harness import FIRST, NAN, RAISE, VOCAB, CoreRig


class WatchedBatcher(SimulatedBatcher):
    """Keeps what it is told, in order."""

    refuses: Exception | None = None
    """Raised by the next `start`."""

    def __init__(self, config: SimulatedBatcherConfig) -> None:
        super().__init__(config)
        self._runner.adapters.held["a:1"] = Path()
        self.started: list[StartRequest] = []
        self.aborted: list[list[int]] = []

    def start(self, request: StartRequest) -> None:
        if self.refuses is not None:
            error, self.refuses = self.refuses, None
            raise error
        self.started.append(request)
        super().start(request)

    def abort(self, ids: list[int]) -> None:  # type: ignore[override]
        self.aborted.append(ids)
        super().abort(ids)


class AutonomousRig(CoreRig):
    core: AutonomousCore

    def __init__(self, config: SchedulerConfig, engine: SimulatedBatcherConfig) -> None:
        super().__init__()
        self.batcher = WatchedBatcher(engine)
        self.core = AutonomousCore(self.batcher, config, self.clock)

    def step(self, *messages: DownMessage) -> StepOutputs:
        known = {request.id for request in self.batcher.started}
        result = super().step(*messages)
        started = [request.id for request in self.batcher.started[len(known) :]]
        assert known.isdisjoint(started), "handed over twice"
        return result

    def started(self) -> list[int]:
        return [request.id for request in self.batcher.started]


def make_rig(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    abort_after: int | None = 0,
    budget: int = 64,
    max_model_len: int = 1000,
    eos: tuple[int, ...] = (),
    **config: object,
) -> AutonomousRig:
    """`budget`: tokens of one iteration of the engine. `config` is SchedulerConfig's."""
    engine = SimulatedBatcherConfig(
        vocab_size=VOCAB,
        first_token_id=FIRST,
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=num_blocks,
        eos_token_ids=eos,
        faults=f"raise={RAISE},nan={NAN}",
        max_num_seqs=budget,
        max_num_batched_tokens=budget,
        abort_after=abort_after,
    )
    limits: dict[str, object] = {"max_num_seqs": 8, "max_num_batched_tokens": 64} | config
    return AutonomousRig(SchedulerConfig(**limits), engine)  # type: ignore[arg-type]
