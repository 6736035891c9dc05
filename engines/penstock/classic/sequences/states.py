"""Implicit state: tensors that the server keeps for a sequence from one request to the next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.classic.model_config import ModelConfig, ModelSequenceBatching, datatype_name
from penstock.classic.model_files import stays_inside
from penstock.classic.sequences.table import Sequence
from penstock.classic.tensors import NUMPY_TYPES, Array, Tensor, element_count, from_buffer
from penstock.engines.errors import InvalidRequestError

FOLDER = "initial_state"
"""Where in the model's folder the files of `data_file` lie."""

MAX_BYTES = 2**30
"""Of one initial state."""


class States:
    """What a model's states are, and where each sequence begins."""

    def __init__(self, config: ModelConfig, model_folder: Path) -> None:
        """Reads files. Raises InvalidRequestError when one is missing or too short."""
        batch = [1] if config.max_batch_size > 0 else []
        self._batch = len(batch)
        states = config.sequence_batching.state
        self._datatypes = {state.input_name: datatype_name(state.data_type) for state in states}
        self._initial = {state.input_name: _initial(state, batch, model_folder) for state in states}
        for array in self._initial.values():
            array.flags.writeable = False  # all sequences begin with the same one
        self._grow = any(dim < 0 for state in states for dim in state.dims)

    def __bool__(self) -> bool:
        return bool(self._initial)

    def shapes(self, sequence: Sequence, start: bool) -> object:
        """What the states of two requests must have in common for these to be batched."""
        if not self._grow:
            return None
        current = self._initial if start or not sequence.states else sequence.states
        return tuple(array.shape[self._batch :] for array in current.values())

    def inputs(self, sequence: Sequence, start: bool) -> dict[str, Tensor]:
        """The state inputs of the sequence's next request; `start` has it begin again."""
        if start or not sequence.states:
            sequence.states = dict(self._initial)
        return self._tensors(sequence.states)

    def blank(self, sequence: Sequence) -> dict[str, Tensor]:
        """State inputs of the same shapes for a slot without a request."""
        return self._tensors({name: zeros(array.dtype, array.shape) for name, array in sequence.states.items()})

    def _tensors(self, arrays: Mapping[str, Array]) -> dict[str, Tensor]:
        return {name: Tensor(name, self._datatypes[name], array) for name, array in arrays.items()}


def zeros(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    return np.full(shape, b"", np.object_) if dtype == np.object_ else np.zeros(shape, dtype)


def _initial(state: ModelSequenceBatching.State, batch: list[int], model_folder: Path) -> Array:
    """Variable dims are 1 where the configuration has no initial state."""
    datatype = datatype_name(state.data_type)
    dims = state.initial_state[0].dims if state.initial_state else [abs(dim) for dim in state.dims]
    shape = (*batch, *dims)
    expected = element_count(shape, state.input_name) * NUMPY_TYPES[datatype].itemsize
    if expected > MAX_BYTES:
        raise InvalidRequestError(f"the state '{state.input_name}' has more than {MAX_BYTES} bytes")
    if not state.initial_state or not state.initial_state[0].data_file:
        return zeros(NUMPY_TYPES[datatype], shape)
    initial = state.initial_state[0]
    data = _read(model_folder / FOLDER, initial.data_file)
    if datatype != "BYTES":
        if len(data) < expected:
            raise InvalidRequestError(
                f"initial_state setting expects {expected} bytes, but the data provided from {initial.data_file} only "
                f"has {len(data)} bytes."
            )
        data = data[:expected]
    return from_buffer(state.input_name, datatype, shape, data).array


def _read(folder: Path, name: str) -> bytes:
    path = folder / name
    if not stays_inside(name) or not path.is_file():
        raise InvalidRequestError(f"there is no file '{name}' in the model's {FOLDER} folder")
    if path.stat().st_size > MAX_BYTES:
        raise InvalidRequestError(f"the initial state '{name}' has more than {MAX_BYTES} bytes")
    return path.read_bytes()
