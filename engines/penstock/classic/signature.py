"""The tensors of a model's configuration, looked up once and read for every request, and the checks of a request
against them.

The checks, their order and texts are those of Triton's server: clients match on these texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from penstock.classic.messages import InferRequest
from penstock.classic.model_config import ModelConfig, ModelInput, ModelOutput, ModelSequenceBatching, datatype_name
from penstock.classic.tensors import NUMPY_TYPES, Array, Tensor
from penstock.engines.errors import InvalidRequestError

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


def _convert(shape: Shape, dims: Iterable[int], target: Iterable[int]) -> Shape:
    """`wanted` with each -1 replaced by what the same -1 of `dims` stands for in `shape`."""
    free = [size for size, dim in zip(shape, dims, strict=True) if dim < 0]
    free.reverse()
    return tuple(free.pop() if dim < 0 and free else dim for dim in target)


_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each "
    "input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting "
    "max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


def check_request(request: InferRequest, signature: ModelSignature) -> int:
    """The batch size: the first dimension of the inputs, at least 1; 0 for a model without batching.

    Raises InvalidRequestError.
    """
    # Nearly all requests are right, and most models have fixed shapes: those are told in one pass over the inputs.
    # Whatever that pass does not understand goes through the checks in full.
    inputs = request.inputs
    if signature.uniform and not request.outputs and len(inputs) == len(signature.inputs):
        size = _uniform_size(inputs, signature)
        if size >= 0:
            return size
    return _checked_size(request, signature)


def request_prefix(request: InferRequest) -> str:
    """What stands before Triton's error texts."""
    return f"[request id: {request.id or '<id_unknown>'}] "


def _uniform_size(inputs: dict[str, Tensor], signature: ModelSignature) -> int:
    """The batch size of a valid request to a model with fixed shapes and no optional inputs, else -1."""
    expected = signature.inputs
    size = -1
    for name, tensor in inputs.items():
        described = expected.get(name)
        if described is None or tensor.datatype != described.datatype:
            return -1
        shape = tensor.array.shape
        if not signature.batched:
            if shape != described.dims:
                return -1
            continue
        if shape[1:] != described.dims or not shape:
            return -1
        if size < 0:
            size = shape[0]
        elif shape[0] != size:
            return -1
    if not signature.batched:
        return 0
    return size if 0 < size <= signature.max_batch_size else -1


def _checked_size(request: InferRequest, signature: ModelSignature) -> int:
    for name in request.outputs:
        if name not in signature.outputs:
            raise InvalidRequestError(f"unexpected inference output '{name}' for model '{signature.model}'")
    prefix = request_prefix(request)
    _check_names(request.inputs, signature, prefix)
    size = _batch_size(request.inputs, signature, prefix) if signature.batched else 0
    for name, tensor in request.inputs.items():
        _check_tensor(tensor, signature.inputs[name], signature, prefix)
    return size


def _check_names(inputs: dict[str, Tensor], signature: ModelSignature, prefix: str) -> None:
    most, least, got = len(signature.inputs), len(signature.required), len(inputs)
    missing = [name for name in signature.required if name not in inputs]
    unknown = [name for name in inputs if name not in signature.inputs]
    if least <= got <= most and unknown:
        raise InvalidRequestError(f"unexpected inference input '{unknown[0]}' for model '{signature.model}'")
    # Triton only counts, so that an optional input can stand in for a required one; models are not made for that.
    if missing or got > most:
        expected = f"{most} inputs" if most == least else f"number of inputs between {least} and {most}"
        raise InvalidRequestError(
            f"{prefix}expected {expected} but got {got} inputs for model '{signature.model}'. Got input(s) "
            f"{_quoted(inputs)}, but missing required input(s) {_quoted(missing)}. Please provide all required "
            "input(s)."
        )


def _batch_size(inputs: dict[str, Tensor], signature: ModelSignature, prefix: str) -> int:
    size: int | None = None
    for name, tensor in inputs.items():
        shape = tensor.array.shape
        if not shape:
            raise InvalidRequestError(
                f"{prefix}input '{name}' has no shape but model requires batch dimension for '{signature.model}'"
            )
        if size is None:
            size = shape[0]
        elif shape[0] != size:
            raise InvalidRequestError(
                f"{prefix}input '{name}' batch size does not match other inputs for '{signature.model}'"
            )
    if size is None:
        return 1
    if not size:
        first = next(iter(inputs))
        raise InvalidRequestError(
            f"{prefix}input byte size mismatch for input '{first}' for model '{signature.model}'. Expected "
            f"{signature.inputs[first].least_bytes}, got 0"
        )
    if size > signature.max_batch_size:
        raise InvalidRequestError(
            f"{prefix}inference request batch-size must be <= {signature.max_batch_size} for '{signature.model}'"
        )
    return size


def _check_tensor(tensor: Tensor, expected: TensorSignature, signature: ModelSignature, prefix: str) -> None:
    if tensor.datatype != expected.datatype:
        raise InvalidRequestError(
            f"{prefix}inference input '{expected.name}' data-type is '{tensor.datatype}', but model "
            f"'{signature.model}' expects '{expected.datatype}'"
        )
    shape = tensor.array.shape
    dims = (-1, *expected.dims) if signature.batched else expected.dims
    if len(shape) != len(dims) or any(dim not in (-1, size) for size, dim in zip(shape, dims, strict=True)):
        raise InvalidRequestError(
            f"{prefix}unexpected shape for input '{expected.name}' for model '{signature.model}'. Expected "
            f"{_dims(dims)}, got {_dims(shape)}. {_BATCH_NOTE if signature.batched else ''}"
        )


def _quoted(names: Iterable[str]) -> str:
    return "[" + ",".join(f"'{name}'" for name in names) + "]"


def _dims(dims: Iterable[int]) -> str:
    return "[" + ",".join(map(str, dims)) + "]"
