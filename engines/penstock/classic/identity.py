"""The identity backend: OUTPUTn is INPUTn, as with Triton's. It needs no model file, and it can misbehave on request.

Parameters of the configuration, for tests of what stands around a model: `execute_delay_ms` (each execution takes that
long) and `fail_on` (an execution that has this text as an element of an input fails).
"""

from __future__ import annotations

import time

import numpy as np

from penstock.classic.base import (
    Backend,
    BackendInstance,
    BackendModel,
    Batch,
    InstanceContext,
    ModelContext,
)
from penstock.classic.messages import InferResponse
from penstock.classic.model_config import ModelConfig
from penstock.classic.signature import ModelSignature
from penstock.classic.tensors import Array, Tensor
from penstock.engines.errors import EngineError


class IdentityBackend(Backend):
    def load_model(self, context: ModelContext) -> BackendModel:
        return _Model(context.config)


class _Model(BackendModel):
    """Raises ValueError when an output has no input of its number and data type, or a parameter makes no sense."""

    def __init__(self, config: ModelConfig) -> None:
        self.sources = dict(_pairs(config))
        self.decoupled = config.model_transaction_policy.decoupled
        self.signature = ModelSignature(config)
        scattered = {name for entry in config.batch_output for name in entry.target_name}
        self.ragged = {source for name, source in self.sources.items() if name not in scattered} & self.signature.ragged
        """Inputs that come back in the shape of each request."""
        self.delay = float(_parameter(config, "execute_delay_ms") or 0) / 1000
        self.fail_on = _parameter(config, "fail_on")

    def load_instance(self, context: InstanceContext) -> BackendInstance:
        return _Instance(self)


class _Instance(BackendInstance):
    def __init__(self, model: _Model) -> None:
        self._model = model

    def execute(self, batch: Batch) -> None:
        model = self._model
        inputs = batch.gather()
        if model.delay:
            time.sleep(model.delay)
        if model.fail_on and any(_has(array, model.fail_on) for array in inputs.values()):
            raise EngineError(f"an input has the element '{model.fail_on}'")
        if not model.decoupled and not model.ragged and all(source in inputs for source in model.sources.values()):
            batch.scatter({name: inputs[source] for name, source in model.sources.items()})
            return
        # Outputs whose optional inputs were left out are left out too.
        for call in batch.calls:
            received = call.request.inputs
            tensors = [
                Tensor(name, received[source].datatype, model.signature.to_model(source, received[source].array))
                for name, source in model.sources.items()
                if source in received
            ]
            call.send(InferResponse(tensors))


def _pairs(config: ModelConfig) -> list[tuple[str, str]]:
    types = {tensor.name: tensor.data_type for tensor in config.input}
    pairs = [(tensor.name, tensor.name.replace("OUTPUT", "INPUT", 1)) for tensor in config.output]
    for tensor, (name, source) in zip(config.output, pairs, strict=True):
        if types.get(source) != tensor.data_type:
            raise ValueError(f"output '{name}' of an identity model needs an input '{source}' of the same data type")
    return pairs


def _parameter(config: ModelConfig, name: str) -> str:
    # Reading a missing key of the map would add it to the configuration.
    return str(config.parameters[name].string_value) if name in config.parameters else ""


def _has(array: Array, text: str) -> bool:
    if array.dtype == np.object_:
        return any(item == text.encode() for item in array.ravel())
    try:
        return bool(np.any(array == array.dtype.type(float(text))))
    except (ValueError, OverflowError):
        return False
