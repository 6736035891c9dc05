"""The seam that our scheduler drives: one step in, tokens out."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable

from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.step import ModelRunnerOutput, SchedulerOutput


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
