"""Checks of batching and `sequence_batching`: the rules of Triton's core, in its words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from penstock.classic.batching.custom import find_strategy
from penstock.classic.batching.ragged import generated_inputs
from penstock.classic.batching.sequences.controls import server_inputs
from penstock.classic.model_config import (
    BatchInput,
    BatchOutput,
    DataType,
    ModelConfig,
    ModelInput,
    ModelOutput,
    ModelSequenceBatching,
)
from penstock.classic.model_files import check_file_name
from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.models.repository.config_fields import SELF_PLACED_BACKENDS

_COUNT_TYPES = (DataType.TYPE_INT32, DataType.TYPE_FP32)


def check_batch_tensors(config: ModelConfig, *, complete: bool) -> None:
    """While inputs and outputs are not `complete`, names may be unknown. Raises InvalidRequestError."""
    suffix = f" for {config.name}"
    for batch_input in config.batch_input:
        _check_form("input", BatchInput, batch_input, suffix)
        if batch_input.data_type not in _COUNT_TYPES:
            raise InvalidRequestError(f"batch input data type must be TYPE_INT32 or TYPE_FP32{suffix}")
    for divided in config.batch_output:
        _check_form("output", BatchOutput, divided, suffix)
    _check_targets("input", [tensor.name for tensor in generated_inputs(config)], suffix)
    _check_targets("output", [name for divided in config.batch_output for name in divided.target_name], suffix)
    if complete:
        _check_names(config, suffix)


def check_strategy(config: ModelConfig, model_folder: Path, version_folder: Path) -> None:
    """Custom batching by files in the model's folder. Raises InvalidRequestError, UnsupportedError."""
    path = find_strategy(config, model_folder, version_folder)
    if path is not None and config.backend in SELF_PLACED_BACKENDS:
        raise UnsupportedError(
            f"custom batching ({path.name}) of model '{config.name}' is not supported: language models have their"
            " scheduler instead",
            param="parameters",
        )


def _check_form(
    kind: str, message: type[BatchInput | BatchOutput], tensor: BatchInput | BatchOutput, suffix: str
) -> None:
    if tensor.kind not in message.Kind.values():
        raise InvalidRequestError(f"unknown batch {kind} kind '{tensor.kind}'{suffix}")
    if len(tensor.source_input) != 1:
        raise InvalidRequestError(
            f"batch {kind} kind '{message.Kind.Name(tensor.kind)}' expects 1 source input, got"
            f" {len(tensor.source_input)}{suffix}"
        )
    if not tensor.target_name:
        raise InvalidRequestError(f"batch {kind} must specify 'target_name'{suffix}")


def _check_names(config: ModelConfig, suffix: str) -> None:
    inputs = {tensor.name: tensor for tensor in config.input}
    outputs = {tensor.name: tensor for tensor in config.output}
    for tensor in (*config.batch_input, *config.batch_output):
        source = inputs.get(tensor.source_input[0])
        if source is None:
            raise InvalidRequestError(f"unknown source input name '{tensor.source_input[0]}'{suffix}")
        if source.optional:
            raise InvalidRequestError(f"source input '{source.name}' must not be optional{suffix}")
    for divided in config.batch_output:
        for name in divided.target_name:
            if name not in outputs:
                raise InvalidRequestError(f"unknown target output name '{name}'{suffix}")
            _check_dims(outputs[name], inputs[divided.source_input[0]], suffix)
    taken = {tensor.name for tensor in (*config.input, *server_inputs(config))}
    for tensor in generated_inputs(config):
        if tensor.name in taken:
            raise InvalidRequestError(f"target input name '{tensor.name}' is the name of another input{suffix}")


def _check_targets(kind: str, names: Iterable[str], suffix: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidRequestError(f"target {kind} name '{name}' can only be specified once{suffix}")
        seen.add(name)


def _check_dims(output: ModelOutput, source: ModelInput, suffix: str) -> None:
    """What is variable in the output is taken from the input, at the same place."""
    places = len(_model_dims(source))
    for place, dim in enumerate(_model_dims(output)):
        if dim < 0 and place >= places:
            raise InvalidRequestError(
                f"dimension {place} of output '{output.name}' is variable, and its source input '{source.name}' has"
                f" {places}{suffix}"
            )


def _model_dims(tensor: ModelInput | ModelOutput) -> list[int]:
    return list(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)


_Control = ModelSequenceBatching.Control
_IDS = frozenset(
    {DataType.TYPE_UINT64, DataType.TYPE_INT64, DataType.TYPE_UINT32, DataType.TYPE_INT32, DataType.TYPE_STRING}
)
_VALUES = ("int32_false_true", "fp32_false_true", "bool_false_true")
_VALID_TYPES = frozenset(DataType.values()) - {DataType.TYPE_INVALID}


def check_sequences(config: ModelConfig) -> None:
    """Raises InvalidRequestError, and UnsupportedError for backends that have no use for it."""
    if not config.HasField("sequence_batching"):
        return
    if config.backend in SELF_PLACED_BACKENDS:
        raise UnsupportedError(
            f"sequence_batching of model '{config.name}' is not supported: {config.backend} schedules by itself",
            param="sequence_batching",
        )
    if config.response_cache.enable:
        raise InvalidRequestError(
            f"Response Cache does not currently support model {config.name} with sequence batching scheduler. Please"
            " disable the response cache."
        )
    _check_controls(config)
    _check_strategy(config)
    _check_states(config)


def _check_strategy(config: ModelConfig) -> None:
    batching, name = config.sequence_batching, config.name
    for size in batching.oldest.preferred_batch_size:
        if size <= 0:
            raise InvalidRequestError(f"sequence batching preferred batch size must be positive for {name}")
        if size > config.max_batch_size:
            raise InvalidRequestError(f"sequence batching preferred batch size must be <= max batch size for {name}")
    if not 0 <= batching.direct.minimum_slot_utilization <= 1:
        raise InvalidRequestError(f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {name}")
    if batching.oldest.max_candidate_sequences < 0:
        raise InvalidRequestError(f"sequence batching max candidate sequences must not be negative for {name}")


def _check_controls(config: ModelConfig) -> None:
    name = config.name
    kinds: Counter[int] = Counter()
    seen: set[str] = set()
    for control_input in config.sequence_batching.control_input:
        if not control_input.name:
            raise InvalidRequestError(f"sequence batching control tensor must have a name for {name}")
        if control_input.name in seen or len(control_input.control) > 1:
            raise InvalidRequestError(
                f"sequence batching control tensor '{control_input.name}' is specified for multiple control kinds for "
                f"{name}"
            )
        seen.add(control_input.name)
        for control in control_input.control:
            _check_control(control, name)
            kinds[control.kind] += 1
            if kinds[control.kind] > 1:
                raise InvalidRequestError(
                    f"sequence batching specifies multiple {_Control.Kind.Name(control.kind)} tensors for {name}"
                )


def _check_control(control: ModelSequenceBatching.Control, name: str) -> None:
    if control.kind not in _Control.Kind.values():
        raise InvalidRequestError(f"unknown kind of a sequence batching control for {name}")
    kind = _Control.Kind.Name(control.kind)
    fields = [field for field in _VALUES if len(getattr(control, field))]
    if control.kind == _Control.CONTROL_SEQUENCE_CORRID:
        if fields:
            raise InvalidRequestError(
                "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or "
                f"'bool_false_true' for {kind} for {name}"
            )
        if control.data_type not in _IDS:
            raise InvalidRequestError(
                f"unexpected data type for control {kind} for {name}. Allowed data types are TYPE_UINT64, TYPE_INT64, "
                "TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
            )
        return
    if not fields:
        raise InvalidRequestError(
            "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
            f"{kind} for {name}"
        )
    if len(fields) > 1:
        raise InvalidRequestError(
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and "
            f"'bool_false_true' for {kind} for {name}"
        )
    if len(getattr(control, fields[0])) != 2:
        raise InvalidRequestError(
            f"sequence batching control '{fields[0]}' must have exactly 2 entries for {kind} for {name}"
        )


def _check_states(config: ModelConfig) -> None:
    states = config.sequence_batching.state
    for kind, names in (
        ("input", [state.input_name for state in states]),
        ("output", [state.output_name for state in states]),
    ):
        for name, count in Counter(names).items():
            if not name:
                raise InvalidRequestError(f"sequence batching state must have an {kind}_name for {config.name}")
            if count > 1:
                raise InvalidRequestError(f"State {kind} name '{name}' specified more than once.")
    for state in states:
        subject = f"sequence batching state '{state.input_name}'"
        if state.data_type not in _VALID_TYPES:
            raise InvalidRequestError(f"{subject} must specify 'data_type' for {config.name}")
        if not state.dims or any(dim < 1 and dim != -1 for dim in state.dims):
            raise InvalidRequestError(
                f"{subject} must specify 'dims' that are integers >= 1, or -1 to indicate a variable-size dimension, "
                f"for {config.name}"
            )
        if state.use_growable_memory and not state.use_same_buffer_for_input_output:
            raise InvalidRequestError(
                "In order to 'use_growable_memory', you must also enable 'use_single_buffer' for state input name "
                f"'{state.input_name}'."
            )
        if len(state.initial_state) > 1:
            raise InvalidRequestError(
                f"initial_state field for state input '{state.input_name}' must contain exactly one or zero element. "
                f"Found '{len(state.initial_state)}' elements."
            )
        for initial in state.initial_state:
            _check_initial(initial, state)


def _check_initial(initial: ModelSequenceBatching.InitialState, state: ModelSequenceBatching.State) -> None:
    name = state.input_name
    if initial.data_type != state.data_type:
        raise InvalidRequestError(
            f"The data type used for 'initial_state' field of state '{name}' does not match the state data type."
        )
    if not initial.name:
        raise InvalidRequestError(f"Field 'name' must be set when using initial_state for state input '{name}'.")
    if len(initial.dims) != len(state.dims):
        raise InvalidRequestError(
            f"Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input "
            f"'{name}'. {len(initial.dims)} != {len(state.dims)}"
        )
    for dim, state_dim in zip(initial.dims, state.dims, strict=True):
        if dim < 1:
            raise InvalidRequestError(
                f"'initial_state' field for state input name '{name}' contains variable dimensions."
            )
        if state_dim not in (-1, dim):
            raise InvalidRequestError(
                f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. {dim} != "
                f"{state_dim}"
            )
    source = initial.WhichOneof("state_data")
    if source is None:
        raise InvalidRequestError(f"initial_state setting expects state'{name}' to have state_data set")
    if source == "data_file":
        check_file_name("data_file", initial.data_file)
