"""What a model's configuration says about its tensors, looked up once and read for every request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from penstock.classic.model_config import ModelConfig, ModelInput, ModelOutput, ModelSequenceBatching, datatype_name
from penstock.classic.tensors import NUMPY_TYPES, Array, Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSignature:
    """An input or output. Shapes are without the batch dimension; -1 stands for any size."""

    name: str
    datatype: str
    dtype: np.dtype[np.generic]
    dims: Shape
    """What callers send and get."""
    reshape: Shape | None
    """What the model takes and gives, where that differs from `dims`."""
    optional: bool
    fixed: bool
    """`dims` has no -1."""

    @property
    def least_bytes(self) -> int:
        """Of one inference, with each -1 taken as 1; elements of BYTES have at least their length."""
        size = 4 if self.datatype == "BYTES" else self.dtype.itemsize
        return size * math.prod(abs(dim) for dim in self.dims)

    def model_shape(self, shape: Shape) -> Shape:
        """The shape for the model of an input that came as `shape`, both without the batch dimension."""
        return shape if self.reshape is None else _convert(shape, self.dims, self.reshape)

    def client_shape(self, shape: Shape) -> Shape:
        """The shape for the caller of an output that the model gave as `shape`, both without the batch dimension."""
        return shape if self.reshape is None else _convert(shape, self.reshape, self.dims)


class ModelSignature:
    """The tensors of a model, by name."""

    def __init__(self, config: ModelConfig) -> None:
        self.model = config.name
        self.max_batch_size = config.max_batch_size
        self.batched = config.max_batch_size > 0
        """Every tensor has the batch dimension first."""
        self.decoupled = config.model_transaction_policy.decoupled
        self.inputs = {tensor.name: _signature(tensor, tensor.optional) for tensor in config.input}
        self.outputs = {tensor.name: _signature(tensor, False) for tensor in config.output}
        self.required = tuple(name for name, tensor in self.inputs.items() if not tensor.optional)
        """Inputs that every request must have."""
        self.ragged = frozenset(tensor.name for tensor in config.input if tensor.allow_ragged_batch)
        """Inputs that may differ in shape within a batch."""
        self.variable = tuple(n for n, tensor in self.inputs.items() if not tensor.fixed and n not in self.ragged)
        """Inputs whose shape differs from request to request, and must be the same within a batch."""
        self.states = {state.output_name: (state.input_name, _state(state)) for state in config.sequence_batching.state}
        """Implicit state, by the name of the output: the input that it is for the next request of the sequence."""
        self.sequences = config.HasField("sequence_batching")
        self.iterative = config.sequence_batching.iterative_sequence
        self.uniform = all(tensor.fixed and not tensor.optional for tensor in self.inputs.values())
        """All valid requests have the same inputs in the same shapes, but for the batch size."""
        self.reshapes_inputs = any(tensor.reshape is not None for tensor in self.inputs.values())
        self.reshapes_outputs = any(tensor.reshape is not None for tensor in self.outputs.values())

    def shapes(self, inputs: Mapping[str, Tensor]) -> object:
        """What requests must have in common to be batched: the same inputs, in the same shapes but for the batch size.

        For valid requests to a model that is not `uniform`.
        """
        batch = int(self.batched)
        variable = tuple(inputs[name].array.shape[batch:] if name in inputs else None for name in self.variable)
        return variable, None if len(inputs) == len(self.inputs) else frozenset(inputs)

    def to_model(self, name: str, array: Array) -> Array:
        """An input as the model takes it: a view, `reshape` applied. What callers do not send stays."""
        tensor = self.inputs.get(name)
        if tensor is None or tensor.reshape is None:
            return array
        batch = int(self.batched)
        return array.reshape((*array.shape[:batch], *tensor.model_shape(array.shape[batch:])))

    def to_client(self, name: str, array: Array) -> Array:
        """An output as the caller gets it: a view, `reshape` undone. What the configuration does not know stays.

        Raises ValueError when the model gave another shape.
        """
        tensor = self.outputs.get(name)
        if tensor is None or tensor.reshape is None:
            return array
        batch = int(self.batched)
        if array.ndim != batch + len(tensor.reshape):
            raise ValueError(f"the output '{name}' has the shape {list(array.shape)}, which does not fit its reshape")
        return array.reshape((*array.shape[:batch], *tensor.client_shape(array.shape[batch:])))


def _signature(tensor: ModelInput | ModelOutput, optional: bool) -> TensorSignature:
    datatype = datatype_name(tensor.data_type)
    if datatype not in NUMPY_TYPES:
        raise ValueError(f"tensor '{tensor.name}' has no data_type that can be served")
    dims = tuple(tensor.dims)
    return TensorSignature(
        name=tensor.name,
        datatype=datatype,
        dtype=NUMPY_TYPES[datatype],
        dims=dims,
        reshape=tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None,
        optional=optional,
        fixed=all(dim >= 0 for dim in dims),
    )


def _state(state: ModelSequenceBatching.State) -> TensorSignature:
    return _signature(ModelOutput(name=state.output_name, data_type=state.data_type, dims=state.dims), False)


def _convert(shape: Shape, dims: Iterable[int], wanted: Iterable[int]) -> Shape:
    """`wanted` with each -1 replaced by what the same -1 of `dims` stands for in `shape`."""
    free = [size for size, dim in zip(shape, dims, strict=True) if dim < 0]
    free.reverse()
    return tuple(free.pop() if dim < 0 and free else dim for dim in wanted)
