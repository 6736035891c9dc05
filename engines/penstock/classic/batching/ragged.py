"""Ragged batches, whose requests differ in shape: `allow_ragged_batch`, `batch_input` and `batch_output`.

The rules are those of Triton's model_config.proto and of its backends that gather tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import monotonic_ns
from typing import Any

import numpy as np

from penstock.classic.batching.batch import ExecBatch, QueuedCall, as_bytes
from penstock.classic.messages import InferResponse
from penstock.classic.model_config import BatchInput, ModelConfig, ModelInput, datatype_name
from penstock.classic.signature import Shape
from penstock.classic.tensors import NUMPY_TYPES, Array, Tensor
from penstock.engines.errors import InvalidRequestError

ITEM_SHAPE = "BATCH_ITEM_SHAPE"

_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class GeneratedInput:
    """A `batch_input`: what the model is told about the requests of a batch."""

    kind: str
    targets: tuple[str, ...]
    """The model's inputs that get it."""
    source: str
    dtype: np.dtype[Any]

    def values(self, shapes: Sequence[Shape]) -> Array:
        """`shapes`: those of the source input, one for each request, the batch dimension first.

        Raises InvalidRequestError for what 32 bits cannot hold.
        """
        counts = [math.prod(shape) for shape in shapes]
        match self.kind:
            case "BATCH_ELEMENT_COUNT":
                return self._typed(np.array(counts))
            case "BATCH_ACCUMULATED_ELEMENT_COUNT":
                return self._typed(np.cumsum(counts))
            case "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO":
                return self._typed(np.cumsum([0, *counts]))
            case "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE":
                # Only its shape says something; in Triton the values are whatever was in memory.
                return np.zeros(max(counts), self.dtype)
        items = self._typed(np.array([shape[1:] for shape in shapes]))
        rows: Array = np.repeat(items, [shape[0] for shape in shapes], axis=0)
        return rows if self.kind == ITEM_SHAPE else rows.ravel()

    def _typed(self, values: Array) -> Array:
        if values.max(initial=0) > _MOST:  # no values: the model takes its source without dimensions
            raise InvalidRequestError(f"input '{self.source}' is too large for batch input '{self.targets[0]}'")
        return values.astype(self.dtype)


@dataclass(frozen=True, slots=True)
class RaggedLayout:
    generated: tuple[GeneratedInput, ...]
    scattered: dict[str, str]
    """Outputs that are divided by the shapes of an input, and that input."""


def ragged_layout(config: ModelConfig) -> RaggedLayout | None:
    """None for a configuration that has none of the three fields."""
    generated = tuple(
        GeneratedInput(
            kind=BatchInput.Kind.Name(entry.kind),
            targets=tuple(entry.target_name),
            source=entry.source_input[0],
            dtype=NUMPY_TYPES[datatype_name(entry.data_type)],
        )
        for entry in config.batch_input
    )
    scattered = {name: entry.source_input[0] for entry in config.batch_output for name in entry.target_name}
    ragged = any(tensor.allow_ragged_batch for tensor in config.input)
    return RaggedLayout(generated, scattered) if ragged or generated or scattered else None


def generated_inputs(config: ModelConfig) -> list[ModelInput]:
    """The inputs that `batch_input` fills, as an input of the configuration would describe what the model takes: with
    all dimensions, for none of them is the batch's."""
    return [
        ModelInput(
            name=name,
            data_type=entry.data_type,
            dims=[-1, -1] if entry.kind == BatchInput.BATCH_ITEM_SHAPE else [-1],
        )
        for entry in config.batch_input
        for name in entry.target_name
    ]


class RaggedBatch(ExecBatch):
    """For models whose configuration has a RaggedLayout; others do not pay for it."""

    __slots__ = ("_layout",)

    def __init__(self, layout: RaggedLayout, *arguments: Any) -> None:
        """`arguments`: those of ExecBatch."""
        super().__init__(*arguments)
        self._layout = layout

    def gather(self) -> dict[str, Array]:
        ragged = self._signature.ragged
        arrays = {
            name: self._flat(name) if name in ragged else self._stacked(name) for name in self.calls[0].request.inputs
        }
        for generated in self._layout.generated:
            values = generated.values(self._source_shapes(generated.source))
            arrays.update(dict.fromkeys(generated.targets, values))
        self.input_end_ns = monotonic_ns()
        return arrays

    def _arrays(self, name: str) -> list[Array]:
        return [call.request.inputs[name].array for call in self.calls]

    def _flat(self, name: str) -> Array:
        """A ragged input: the elements of all requests one after the other, in one dimension."""
        arrays = [array.reshape(-1) for array in self._arrays(name)]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def _stacked(self, name: str) -> Array:
        arrays = self._arrays(name)
        return self._signature.to_model(name, arrays[0] if len(arrays) == 1 else np.concatenate(arrays))

    def _source_shapes(self, name: str) -> list[Shape]:
        """The model's shapes of an input in each request, with a batch dimension even in models without."""
        expected, batched = self._signature.inputs[name], self._signature.batched
        shapes = [array.shape if batched else (1, *array.shape) for array in self._arrays(name)]
        return [(shape[0], *expected.model_shape(shape[1:])) for shape in shapes]

    def scatter(self, outputs: Mapping[str, Array]) -> None:
        if not self._layout.scattered:
            super().scatter(outputs)
            return
        self.output_start_ns = monotonic_ns()
        names = self._requested_outputs()
        parts = {name: self._parts(name, outputs.get(name)) for name in names}
        if self._signature.states:
            self._keep_states(outputs)
        for number, call in enumerate(self.calls):
            if not call.answered:
                call.sent = call.answered = True
                self._emit(call, InferResponse([parts[name][number] for name in call.request.outputs or names]))

    def _parts(self, name: str, array: Array | None) -> list[Tensor]:
        """An output of each request. Raises ValueError."""
        signature = self._signature
        expected = signature.outputs[name]
        source = self._layout.scattered.get(name)
        if source is not None and array is not None:
            flat = np.ascontiguousarray(as_bytes(array, expected)).reshape(-1)
            shapes = [self._output_shape(name, shape) for shape in self._source_shapes(source)]
            arrays = _divided(flat, shapes, name)
            return [Tensor(name, expected.datatype, signature.to_client(name, one)) for one in arrays]
        datatype, checked = self._checked(expected, array, self.size)
        if not signature.batched:
            return [Tensor(name, datatype, checked)]
        ends = accumulate(call.size for call in self.calls)
        return [
            Tensor(name, datatype, checked[end - call.size : end]) for call, end in zip(self.calls, ends, strict=True)
        ]

    def _output_shape(self, name: str, source: Shape) -> Shape:
        """The output's shape for one request: what is variable in it is what the input has at the same place."""
        expected = self._signature.outputs[name]
        dims = (-1, *(expected.dims if expected.reshape is None else expected.reshape))
        filled = tuple(source[place] if dim < 0 else dim for place, dim in enumerate(dims))
        return filled if self._signature.batched else filled[1:]

    def _alone(self, call: QueuedCall) -> ExecBatch:
        return RaggedBatch(self._layout, [call], self._signature, self._post, self._places)


def _divided(flat: Array, shapes: Sequence[Shape], name: str) -> list[Array]:
    """One array for each of the shapes. Raises ValueError when their elements are not all there, or too many."""
    sizes = [math.prod(shape) for shape in shapes]
    if flat.size != sum(sizes):
        raise ValueError(f"the output '{name}' has {flat.size} elements, the requests of the batch need {sum(sizes)}")
    ends = accumulate(sizes)
    return [flat[end - size : end].reshape(shape) for shape, size, end in zip(shapes, sizes, ends, strict=True)]
