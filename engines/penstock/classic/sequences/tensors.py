"""Tensors of a model that no caller sends or gets: controls and implicit state."""

from __future__ import annotations

from penstock.classic.model_config import ModelConfig, ModelInput, ModelOutput, datatype_value
from penstock.classic.sequences.controls import control_datatype


def server_inputs(config: ModelConfig) -> list[ModelInput]:
    """Those that the server fills in, as an input of the configuration would describe them."""
    batching = config.sequence_batching
    own = {tensor.name for tensor in config.input}
    found = [
        ModelInput(name=each.name, data_type=datatype_value(control_datatype(each.control[0])), dims=[1])
        for each in batching.control_input
        if each.control
    ]
    found += [ModelInput(name=state.input_name, data_type=state.data_type, dims=state.dims) for state in batching.state]
    return [tensor for tensor in found if tensor.name not in own]


def state_outputs(config: ModelConfig) -> list[ModelOutput]:
    """Those that callers do not get, as an output of the configuration would describe them."""
    own = {tensor.name for tensor in config.output}
    return [
        ModelOutput(name=state.output_name, data_type=state.data_type, dims=state.dims)
        for state in config.sequence_batching.state
        if state.output_name not in own
    ]
