"""What a configuration says about ragged batches: `allow_ragged_batch`, `batch_input` and `batch_output`.

The rules are those of Triton's model_config.proto and of its backends that gather tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.classic.model_config import BatchInput, ModelConfig, ModelInput, datatype_name
from penstock.classic.signature import Shape
from penstock.classic.tensors import NUMPY_TYPES, Array
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
            kind=BatchInput.Kind.Name(each.kind),
            targets=tuple(each.target_name),
            source=each.source_input[0],
            dtype=NUMPY_TYPES[datatype_name(each.data_type)],
        )
        for each in config.batch_input
    )
    scattered = {name: each.source_input[0] for each in config.batch_output for name in each.target_name}
    ragged = any(tensor.allow_ragged_batch for tensor in config.input)
    return RaggedLayout(generated, scattered) if ragged or generated or scattered else None


def generated_inputs(config: ModelConfig) -> list[ModelInput]:
    """The inputs that `batch_input` fills, as an input of the configuration would describe what the model takes: with
    all dimensions, for none of them is the batch's."""
    return [
        ModelInput(
            name=name,
            data_type=each.data_type,
            dims=[-1, -1] if each.kind == BatchInput.BATCH_ITEM_SHAPE else [-1],
        )
        for each in config.batch_input
        for name in each.target_name
    ]
