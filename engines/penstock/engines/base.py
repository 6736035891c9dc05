"""The two seams of the server (docs/architecture.md).

`Engine` is what the gateway sees: requests in, token deltas out. `ModelRunner` is what our scheduler drives: one step
in, one token per sampled request out. Autonomous engines with a batcher of their own implement `Engine` directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.engines.messages import AddRequest, EngineStats, ModelInfo
from penstock.engines.scheduler.output import ModelRunnerOutput, SchedulerOutput
from penstock.engines.stream import RequestStream


class ModelRunner(Protocol):
    """Runs one step at a time. Owns the weights and the KV cache tensors; knows nothing of queues or clients."""

    @property
    def info(self) -> ModelInfo: ...

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Computes one step. An exception fails the requests of this step; `reset` is called before the next."""
        ...

    def reset(self) -> None:
        """Forgets all requests. Called after a failed step; the prefix cache is dropped with it."""
        ...

    def close(self) -> None: ...


class Engine(Protocol):
    """A loaded model that generates. Lives on the gateway's event loop."""

    @property
    def info(self) -> ModelInfo:
        """Raises NotReadyError before the engine has ever been ready."""
        ...

    @property
    def ready(self) -> bool:
        """True while requests would be served now: loaded, alive, and stepping."""
        ...

    @property
    def failed(self) -> bool:
        """True when it is down and will not come back by itself."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The newest that the engine has sent."""
        ...

    async def start(self) -> None:
        """Loads the model; returns when it can serve. Raises EngineError when it cannot be loaded."""
        ...

    def new_ids(self, count: int) -> tuple[int, ...]:
        """Fresh ids for AddRequest.ids; never used again during the life of this engine object."""
        ...

    def submit(self, requests: Sequence[AddRequest]) -> RequestStream:
        """Hands requests (the prompts of one client call) to the engine; their outputs come through one stream.

        Raises NotReadyError at once when the engine is not there. Refusals by the scheduler (queue full, can never
        fit) come as the stream's terminal outputs.
        """
        ...

    def abort(self, ids: Sequence[int]) -> None:
        """Ends requests early; their blocks are free before the next step. Unknown ids are ignored. Their stream ends
        them with FinishReason.ABORT at once, without waiting for the engine."""
        ...

    async def stop(self) -> None:
        """Ends what is still running with EngineDeadError and frees everything."""
        ...
