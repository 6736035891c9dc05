"""The seams of the language models' side (docs/architecture.md).

`Engine` is what the gateway sees: requests in, token deltas out. Behind it, in the engine process, stands one of two:
a `ModelRunner`, which our scheduler drives step by step, or a `Batcher`, which schedules by itself what our admission
queue hands it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from penstock.engines.autonomous.messages import BatcherOutput, StartRequest
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


class Batcher(Protocol):
    """An engine with a scheduler and a KV cache of its own: vLLM's core, TensorRT-LLM.

    It is handed requests only when it can run them now (`engines.autonomous`): who waits, for how long and behind whom
    is decided before, by the same policies that hold for model runners.
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
        """Gives requests up. They count as running until `step` reports them in `released`."""
        ...

    def step(self) -> BatcherOutput:
        """What has come since the last call; one iteration, where the engine advances in here. An exception means
        that the engine is beyond repair: its process ends."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class AdapterHost(Protocol):
    """What a ModelRunner or Batcher is besides if LoRA adapters can come and go while it runs.

    Keys are unique among all adapters that an engine has ever had, since they divide the prefix cache: a name that is
    loaded again with other weights gets another key.
    """

    def load_adapter(self, key: str, folder: Path) -> None:
        """Makes `AddRequest.adapter == key` valid. `folder` is in PEFT's format: adapter_config.json and safetensors.

        Raises InvalidRequestError for files that do not fit the model, OverloadedError when there is no slot left.
        """
        ...

    def unload_adapter(self, key: str) -> None:
        """Frees it. No request uses it any more. Unknown keys are ignored."""
        ...


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

    async def load_adapter(self, key: str, folder: Path) -> None:
        """Loads a LoRA adapter (`AdapterHost`); after a restart of the engine it is there again.

        Raises UnsupportedError where the engine has no adapters, InvalidRequestError, OverloadedError, EngineError.
        """
        ...

    async def unload_adapter(self, key: str) -> None:
        """Frees it. No request may use it any more."""
        ...

    async def stop(self) -> None:
        """Ends what is still running with EngineDeadError and frees everything."""
        ...
