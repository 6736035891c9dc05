"""What a backend needs around it in a test: contexts, and batches that remember their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
from google.protobuf import text_format

from penstock.classic.base import Backend, BackendInstance, Host, InstanceContext, ModelContext
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.model_config import ModelConfig
from penstock.classic.tensors import Array, Tensor, datatype_of
from penstock.engines.errors import PenstockError


def model_config(text: str = "", name: str = "m", **fields: Any) -> ModelConfig:
    config = ModelConfig(name=name, **fields)
    text_format.Merge(text, config)
    return config


def model_context(config: ModelConfig, version_folder: Path) -> ModelContext:
    return ModelContext(
        name=config.name,
        version=1,
        config=config,
        model_folder=version_folder.parent,
        version_folder=version_folder,
        host=cast(Host, None),
    )


def load(
    backend: Backend, config: ModelConfig, version_folder: Path, *, kind: str = "CPU", device_id: int = 0
) -> BackendInstance:
    """Completed and loaded as by the server; one instance of it."""
    backend.auto_complete(config, version_folder)
    model = backend.load_model(model_context(config, version_folder))
    instance = model.load_instance(InstanceContext(name=f"{config.name}_0_0", kind=kind, device_id=device_id))
    assert isinstance(instance, BackendInstance)
    return instance


class RecordedCall:
    def __init__(self, arrays: Mapping[str, Array], outputs: tuple[str, ...] = ()) -> None:
        tensors = {name: Tensor(name, datatype_of(array.dtype), array) for name, array in arrays.items()}
        self.request = InferRequest(inputs=tensors, outputs=outputs)
        self.cancelled = False
        self.responses: list[InferResponse] = []
        self.error: PenstockError | None = None

    def send(self, response: InferResponse) -> None:
        self.responses.append(response)

    def fail(self, error: PenstockError) -> None:
        self.error = error


class RecordedBatch:
    """Requests with a batch dimension, or a single one without."""

    def __init__(self, *calls: RecordedCall) -> None:
        self.calls: Sequence[RecordedCall] = calls
        self.outputs: dict[str, Array] = {}

    def gather(self) -> dict[str, Array]:
        names = self.calls[0].request.inputs
        parts = {name: [call.request.inputs[name].array for call in self.calls] for name in names}
        return {name: arrays[0] if len(arrays) == 1 else np.concatenate(arrays) for name, arrays in parts.items()}

    def scatter(self, outputs: Mapping[str, Array]) -> None:
        self.outputs = dict(outputs)


def run(instance: BackendInstance, outputs: tuple[str, ...] = (), **arrays: Array) -> dict[str, Array]:
    """One request alone."""
    batch = RecordedBatch(RecordedCall(arrays, outputs))
    instance.execute(batch)
    return batch.outputs
