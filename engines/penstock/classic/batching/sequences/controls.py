"""Tensors that no caller sends or gets: control inputs, which tell a model a request's place in its sequence, and
states.
"""

from __future__ import annotations

import numpy as np

from penstock.classic.messages import InferRequest
from penstock.classic.model_config import (
    ModelConfig,
    ModelInput,
    ModelOutput,
    ModelSequenceBatching,
    datatype_name,
    datatype_value,
)
from penstock.classic.tensors import NUMPY_TYPES, Array, Tensor
from penstock.engines.errors import InvalidRequestError

_Control = ModelSequenceBatching.Control
_FLAGS = (_Control.CONTROL_SEQUENCE_START, _Control.CONTROL_SEQUENCE_END, _Control.CONTROL_SEQUENCE_READY)


class Controls:
    """Makes the control tensors of a model: shape [1, 1] where it batches, else [1]."""

    def __init__(self, config: ModelConfig) -> None:
        self._shape = (1, 1) if config.max_batch_size > 0 else (1,)
        self._corrid: tuple[str, str] | None = None
        """Name and datatype."""
        choices: list[tuple[int, str, str, list[Array]]] = []
        for control_input in config.sequence_batching.control_input:
            for control in control_input.control:
                if control.kind in _FLAGS:
                    datatype, values = flag_values(control)
                    arrays = [np.full(self._shape, value, NUMPY_TYPES[datatype]) for value in values]
                    for array in arrays:
                        array.flags.writeable = False
                    choices.append((control.kind, control_input.name, datatype, arrays))
                else:
                    self._corrid = control_input.name, datatype_name(control.data_type)
        self._flags = {
            (start, end, ready): {
                name: Tensor(name, datatype, arrays[(start, end, ready)[_FLAGS.index(kind)]])
                for kind, name, datatype, arrays in choices
            }
            for start, end, ready in (
                *((start, end, True) for start in (False, True) for end in (False, True)),
                (False, False, False),
            )
        }

    def check(self, request: InferRequest) -> None:
        """Raises InvalidRequestError for an id that the model's tensor cannot hold."""
        if self._corrid is not None and self._corrid[1] != "BYTES" and isinstance(request.correlation_id, str):
            raise InvalidRequestError(
                f"inference request for sequence {request.correlation_id} must specify an integer as correlation ID: "
                f"the model takes it as {self._corrid[1]}"
            )

    def tensors(self, request: InferRequest) -> dict[str, Tensor]:
        """Of a request whose turn it is."""
        flags = self._flags[request.sequence_start, request.sequence_end, True]
        return flags if self._corrid is None else flags | self._id(request.correlation_id)

    def not_ready(self) -> dict[str, Tensor]:
        """Of a slot without a request."""
        flags = self._flags[False, False, False]
        return flags if self._corrid is None else flags | self._id(0)

    def _id(self, id: int | str) -> dict[str, Tensor]:
        assert self._corrid is not None
        name, datatype = self._corrid
        dtype = NUMPY_TYPES[datatype]
        if datatype == "BYTES":
            array = np.full(self._shape, str(id or "").encode(), dtype)
        else:
            # As in Triton, a narrow tensor gets the low bits.
            low = int(id) % 2 ** (8 * dtype.itemsize)
            array = np.frombuffer(low.to_bytes(dtype.itemsize, "little"), dtype).reshape(self._shape)
        return {name: Tensor(name, datatype, array)}


def flag_values(control: ModelSequenceBatching.Control) -> tuple[str, list[int | float | bool]]:
    """The datatype of a control that is no id, and what stands for false and true."""
    if control.int32_false_true:
        return "INT32", list(control.int32_false_true)
    if control.fp32_false_true:
        return "FP32", list(control.fp32_false_true)
    return "BOOL", list(control.bool_false_true)


def control_datatype(control: ModelSequenceBatching.Control) -> str:
    return flag_values(control)[0] if control.kind in _FLAGS else datatype_name(control.data_type)


def server_inputs(config: ModelConfig) -> list[ModelInput]:
    """Those that the server fills in, as an input of the configuration would describe them."""
    batching = config.sequence_batching
    own = {tensor.name for tensor in config.input}
    inputs = [
        ModelInput(name=entry.name, data_type=datatype_value(control_datatype(entry.control[0])), dims=[1])
        for entry in batching.control_input
        if entry.control
    ]
    inputs += [
        ModelInput(name=state.input_name, data_type=state.data_type, dims=state.dims) for state in batching.state
    ]
    return [tensor for tensor in inputs if tensor.name not in own]


def state_outputs(config: ModelConfig) -> list[ModelOutput]:
    """Those that callers do not get, as an output of the configuration would describe them."""
    own = {tensor.name for tensor in config.output}
    return [
        ModelOutput(name=state.output_name, data_type=state.data_type, dims=state.dims)
        for state in config.sequence_batching.state
        if state.output_name not in own
    ]
