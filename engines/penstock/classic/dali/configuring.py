"""Filling a configuration from a pipeline's definition, and checking one against it: the rules of Triton's backend."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from penstock.classic.dali.definition import Definition, PipelineTensor
from penstock.classic.model_config import ModelConfig, ModelInput, ModelOutput, datatype_name, datatype_value
from penstock.classic.parameters import strings


def complete(config: ModelConfig, definition: Definition) -> None:
    """Inputs by their names, outputs by their places; the batch size is the pipeline's if there is none.

    Raises ValueError when neither the pipeline nor the configuration says what is needed.
    """
    config.max_batch_size = config.max_batch_size or definition.batch_size
    if config.max_batch_size > 1 and config.WhichOneof("scheduling_choice") is None:
        config.dynamic_batching.SetInParent()
    inputs = {tensor.name: tensor for tensor in config.input}
    for known in definition.inputs:
        _fill(config, "input", inputs.get(known.name) or config.input.add(name=known.name), known)
    split = split_outputs(config)
    for place, known in enumerate(definition.outputs):
        found = config.output[place] if place < len(config.output) else config.output.add(name=known.name)
        _fill(config, "output", found, _answered(known, found.name in split))


def _fill(config: ModelConfig, kind: str, tensor: ModelInput | ModelOutput, known: PipelineTensor) -> None:
    if not tensor.data_type and known.datatype:
        tensor.data_type = datatype_value(known.datatype)
    if not tensor.dims and known.rank is not None:
        if isinstance(tensor, ModelInput) and known.rank:
            # samples of other shapes go into one batch, as with Triton
            tensor.allow_ragged_batch = True
        tensor.dims.extend([-1] * known.rank or [1])
        if not known.rank:
            tensor.reshape.SetInParent()
    if not tensor.data_type or not tensor.dims:
        raise ValueError(
            f"the pipeline of model '{config.name}' does not say what its {kind} '{known.name}' is: give it a dtype and"
            " ndim there, or list it in config.pbtxt"
        )


def check(config: ModelConfig, definition: Definition) -> None:
    """Raises ValueError when the configuration is not one of this pipeline."""
    if config.model_transaction_policy.decoupled:
        raise ValueError(f"model '{config.name}' must not be decoupled: a pipeline answers a request once")
    inputs = {tensor.name: tensor for tensor in definition.inputs}
    for tensor in config.input:
        if tensor.name not in inputs:
            raise ValueError(
                f"the pipeline of model '{config.name}' has no input '{tensor.name}', only {_names(inputs)}"
            )
        _check_tensor(config, "input", tensor, inputs.pop(tensor.name))
    if inputs:
        raise ValueError(
            f"the pipeline of model '{config.name}' has inputs that the configuration lacks: {_names(inputs)}"
        )
    if len(config.output) != len(definition.outputs):
        raise ValueError(
            f"the pipeline of model '{config.name}' has {len(definition.outputs)} outputs, the configuration"
            f" {len(config.output)}"
        )
    split = split_outputs(config)
    for output, known in zip(config.output, definition.outputs, strict=True):
        _check_tensor(config, "output", output, _answered(known, output.name in split))


def split_outputs(config: ModelConfig) -> frozenset[str]:
    """Outputs whose samples are split along their first dimension, which is then the batch's: the parameter
    `split_along_outer_axis`. Raises ValueError when it names none of the outputs."""
    found = frozenset(filter(None, strings(config).get("split_along_outer_axis", "").split(":")))
    if unknown := sorted(found - {tensor.name for tensor in config.output}):
        raise ValueError(f"parameter 'split_along_outer_axis' names '{unknown[0][:100]}', which is no output")
    return found


def _answered(known: PipelineTensor, is_split: bool) -> PipelineTensor:
    return replace(known, rank=known.rank - 1) if is_split and known.rank else known


def is_encoded(tensor: ModelInput) -> bool:
    """BYTES[1]: each element is the file of one sample, and they may have different lengths."""
    return datatype_name(tensor.data_type) == "BYTES"


def _check_tensor(config: ModelConfig, kind: str, tensor: ModelInput | ModelOutput, known: PipelineTensor) -> None:
    if isinstance(tensor, ModelInput) and tensor.allow_ragged_batch and is_encoded(tensor):
        raise ValueError(
            f"input '{tensor.name}' of model '{config.name}' is TYPE_STRING and needs no allow_ragged_batch"
        )
    datatype = datatype_name(tensor.data_type)
    dims = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
    if kind == "input" and datatype == "BYTES":
        if list(tensor.dims) != [1] or known.datatype not in ("", "UINT8"):
            raise ValueError(
                f"input '{tensor.name}' of model '{config.name}' can be a TYPE_STRING for UINT8, with dims [ 1 ]"
            )
        return
    if known.datatype and datatype != known.datatype:
        raise ValueError(
            f"unable to load model '{config.name}', configuration expects datatype TYPE_{datatype} for {kind}"
            f" '{tensor.name}', model provides TYPE_{known.datatype}"
        )
    if known.rank is not None and len(dims) != known.rank:
        raise ValueError(
            f"{kind} '{tensor.name}' of model '{config.name}' has {known.rank} dimensions in the pipeline, and"
            f" {len(dims)} in the configuration"
        )


def _names(found: Iterable[str]) -> str:
    return ", ".join(map(repr, found)) or "none"
