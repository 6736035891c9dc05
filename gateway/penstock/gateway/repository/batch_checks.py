"""Whether ragged and custom batching make sense: the rules of Triton's core, in its words, and some of ours."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from penstock.classic.batching.custom import find_strategy
from penstock.classic.batching.ragged import generated_inputs
from penstock.classic.batching.sequences.controls import server_inputs
from penstock.classic.model_config import BatchInput, BatchOutput, DataType, ModelConfig, ModelInput, ModelOutput
from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.repository.config_fields import SELF_PLACED_BACKENDS

_COUNT_TYPES = (DataType.TYPE_INT32, DataType.TYPE_FP32)


def check_batch_tensors(config: ModelConfig, *, complete: bool) -> None:
    """While inputs and outputs are not `complete`, names may be unknown. Raises InvalidRequestError."""
    suffix = f" for {config.name}"
    for made in config.batch_input:
        _check_form("input", BatchInput, made, suffix)
        if made.data_type not in _COUNT_TYPES:
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
