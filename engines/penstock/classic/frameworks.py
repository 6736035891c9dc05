"""The common parts of backends for the model files of frameworks: their packages, text and scalars, and what a model
file says of its own tensors, from which a configuration is filled and against which it is checked.

The rules and the texts are those of Triton's ONNX Runtime and TensorRT backends.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.classic.base import InferCall
from penstock.classic.batching.ragged import generated_inputs
from penstock.classic.batching.sequences.controls import server_inputs, state_outputs
from penstock.classic.model_config import (
    DataType,
    ModelConfig,
    ModelInput,
    ModelOutput,
    datatype_value,
)
from penstock.classic.tensors import Array, config_type
from penstock.engines.errors import InvalidRequestError


def wanted_outputs(calls: Iterable[InferCall], outputs: Sequence[str], states: Collection[str] = ()) -> Sequence[str]:
    """Those of `outputs` that some request of the batch asked for, in this order, and always `states`: the outputs
    that the server keeps for sequences."""
    names: set[str] = set()
    for call in calls:
        if not call.request.outputs:
            return outputs
        names.update(call.request.outputs)
    return [name for name in outputs if name in names or name in states]


class Scalars:
    def __init__(self, inputs: Iterable[str], outputs: Collection[str], configured: Iterable[ModelOutput]) -> None:
        """`inputs` and `outputs` name the model's scalars. `configured` are all outputs of the configuration."""
        self._inputs = tuple(inputs)
        self.outputs = {tensor.name: tuple(tensor.dims) for tensor in configured if tensor.name in outputs}
        """With the shapes that the configuration gives them."""

    def for_model(self, feed: dict[str, Array]) -> None:
        """Gives inputs of one element the model's shape."""
        for name in self._inputs:
            if name in feed and feed[name].size == 1:
                feed[name] = feed[name].reshape(())

    def as_configured(self, outputs: dict[str, Array]) -> None:
        for name, dims in self.outputs.items():
            if name in outputs and outputs[name].size == 1:
                outputs[name] = outputs[name].reshape(dims)


def to_text(name: str, array: Array) -> Array:
    """Strings from bytes. Raises InvalidRequestError for bytes that are no UTF-8: the model's strings are text."""
    texts = np.empty(array.size, np.object_)
    try:
        texts[:] = [item.decode() for item in array.ravel().tolist()]
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"input '{name}' has a string that is not UTF-8 at byte {error.start}") from error
    return texts.reshape(array.shape)


def to_bytes(array: Array) -> Array:
    encoded = np.empty(array.size, np.object_)
    encoded[:] = [item.encode() for item in array.ravel().tolist()]
    return encoded.reshape(array.shape)


def load_package(module: str, purpose: str, install: str) -> Any:
    """The module. Raises ValueError that says how to install it.

    `purpose` is what needs it ("XGBoost models"), `install` what pip installs for it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing_package(module, purpose, error, install) from error


def missing_package(module: str, purpose: str, reason: object, install: str) -> ValueError:
    return ValueError(f"{purpose} need the package {module} ({reason}): pip install {install}")


DEFAULT_MAX_BATCH_SIZE = 4
"""Of a model that can batch, where neither its configuration nor `default-max-batch-size` says anything."""


@dataclass(frozen=True, slots=True)
class DescribedTensor:
    name: str
    datatype: str
    """In the protocol's words (`FP32`); what has no such word stays in the framework's (`seq(tensor(float))`)."""
    shape: tuple[int, ...]
    """The whole one, batch dimension included; -1 for variable dimensions."""


@dataclass(frozen=True, slots=True)
class DescribedModel:
    inputs: tuple[DescribedTensor, ...]
    outputs: tuple[DescribedTensor, ...]
    optional_inputs: tuple[DescribedTensor, ...] = ()
    """May be fed, need not: the model has values of its own for them."""


def is_complete(config: ModelConfig) -> bool:
    """Inputs and outputs are given: as in Triton, nothing is completed then, the batch size neither."""
    return bool(config.input) and bool(config.output)


def default_max_batch_size(options: Mapping[str, str]) -> int:
    """What `--backend-config=default-max-batch-size=<n>` says. Raises ValueError when that is no number."""
    text = options.get("default-max-batch-size", str(DEFAULT_MAX_BATCH_SIZE))
    try:
        return max(0, int(text))
    except ValueError:
        raise ValueError(f"default-max-batch-size must be a number, not '{text}'") from None


def complete(config: ModelConfig, described: DescribedModel, max_batch_size: int) -> None:
    """Fills in the batch size (`max_batch_size` for models that can batch), dynamic batching, inputs and outputs.

    Raises ValueError when the configuration asks for batching of a model that cannot batch.
    """
    if all(tensor.shape[:1] == (-1,) for tensor in (*described.inputs, *described.outputs)):
        config.max_batch_size = config.max_batch_size or max_batch_size
        if config.max_batch_size > 1 and config.WhichOneof("scheduling_choice") is None:
            config.dynamic_batching.SetInParent()
    elif config.max_batch_size:
        raise ValueError(
            f"autofill failed for model '{config.name}': model does not support batching while non-zero max_batch_size"
            " is specified"
        )
    hidden = {tensor.name for tensor in (*server_inputs(config), *generated_inputs(config), *state_outputs(config))}
    if not config.input:
        for tensor in described.inputs:
            if tensor.name not in hidden:
                _fill(config.input.add(), tensor, config.max_batch_size)
    if not config.output:
        for tensor in described.outputs:
            if tensor.name not in hidden:
                _fill(config.output.add(), tensor, config.max_batch_size)


def _fill(entry: ModelInput | ModelOutput, tensor: DescribedTensor, max_batch_size: int) -> None:
    entry.name = tensor.name
    try:
        entry.data_type = datatype_value(tensor.datatype)
    except ValueError:
        raise ValueError(f"'{tensor.name}' is a {tensor.datatype}, which no request can carry") from None
    dims = tensor.shape[1:] if max_batch_size else tensor.shape
    entry.dims.extend(dims or (1,))
    if not dims and max_batch_size:
        entry.reshape.SetInParent()


def check(config: ModelConfig, described: DescribedModel) -> None:
    """Raises ValueError, with Triton's text, when the configuration is not one of this model."""
    inputs = [*config.input, *server_inputs(config)]
    generated = generated_inputs(config)
    required = sum(not tensor.optional for tensor in (*inputs, *generated))
    if required != len(described.inputs):
        raise ValueError(
            f"unable to load model '{config.name}', configuration expects {required} inputs, model provides"
            f" {len(described.inputs)}"
        )
    for tensor in config.input:
        if tensor.optional and config.max_batch_size:
            raise ValueError(
                f"unable to load model '{config.name}', optional input '{tensor.name}' is not supported for models that"
                " support batching"
            )
    provided = (*described.inputs, *described.optional_inputs)
    _check_all(config, "input", inputs, provided)
    for generated_tensor in generated:
        _check_generated(config, generated_tensor, _provided(config, "input", generated_tensor, provided))
    _check_all(config, "output", [*config.output, *state_outputs(config)], described.outputs)


def scalars_of(tensors: Iterable[DescribedTensor]) -> list[str]:
    """Names of those without dimensions."""
    return [tensor.name for tensor in tensors if not tensor.shape]


def _check_all(
    config: ModelConfig,
    kind: str,
    tensors: Iterable[ModelInput | ModelOutput],
    described: Sequence[DescribedTensor],
) -> None:
    scattered = {name for entry in config.batch_output for name in entry.target_name} if kind == "output" else ()
    for tensor in tensors:
        provided = _provided(config, kind, tensor, described)
        dims = tuple(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)
        if isinstance(tensor, ModelInput) and tensor.allow_ragged_batch:
            if provided.shape != (-1,):
                raise ValueError(
                    f"unable to load model '{config.name}', configuration expects model provides input with shape [-1] "
                    f" for ragged input '{tensor.name}', model provides {_text(provided.shape)}"
                )
        elif tensor.name in scattered:
            continue  # it is divided by the shapes of an input, whatever its own is
        elif provided.shape or config.max_batch_size:
            _check_dims(config, provided, dims, exact=kind == "output")
        elif any(dim != 1 for dim in dims):
            raise ValueError(
                f"unable to load model '{config.name}', scalar tensor '{tensor.name}', should only provide 1 in the"
                " model configuration when the model doesn't support batching. Model configuration provided:"
                f" {_text(dims)}."
            )


def _provided(
    config: ModelConfig, kind: str, tensor: ModelInput | ModelOutput, described: Sequence[DescribedTensor]
) -> DescribedTensor:
    """The model's tensor of that name and datatype. Raises ValueError."""
    known = {tensor.name: tensor for tensor in described}
    provided = known.get(tensor.name)
    if provided is None:
        raise ValueError(
            f"unexpected inference {kind} '{tensor.name}', allowed {kind}s are: {', '.join(sorted(known))}"
        )
    data_type = DataType.Name(tensor.data_type)
    if data_type != config_type(provided.datatype):
        raise ValueError(
            f"unable to load model '{config.name}', configuration expects datatype {data_type} for {kind}"
            f" '{tensor.name}', model provides {config_type(provided.datatype)}"
        )
    return provided


def _check_generated(config: ModelConfig, tensor: ModelInput, described: DescribedTensor) -> None:
    if len(described.shape) != len(tensor.dims):
        raise ValueError(
            f"unable to load model '{config.name}', batch input '{tensor.name}' has {len(tensor.dims)} dimensions,"
            f" model provides {_text(described.shape)}"
        )


def _check_dims(config: ModelConfig, described: DescribedTensor, dims: tuple[int, ...], *, exact: bool) -> None:
    """A variable dimension of the model takes any configured one for an input; for an output it must be the same."""
    about = f"model '{config.name}', tensor '{described.name}': "
    batched = config.max_batch_size > 0
    if batched and described.shape[:1] != (-1,):
        raise ValueError(
            f"{about}for the model to support batching the shape should have at least 1 dimension and the first"
            f" dimension must be -1; but shape expected by the model is {_text(described.shape)}"
        )
    whole = (-1, *dims) if batched else dims
    if len(whole) == len(described.shape) and all(
        theirs == ours or (theirs == -1 and not exact) for theirs, ours in zip(described.shape, whole, strict=True)
    ):
        return
    how = (
        "an initial batch dimension because max_batch_size > 0 followed by the explicit tensor shape, making complete"
        f" shape {_text(whole)}"
        if batched
        else f"shape {_text(whole)}"
    )
    raise ValueError(
        f"{about}the model expects {len(described.shape)} dimensions (shape {_text(described.shape)}) but the model"
        f" configuration specifies {len(whole)} dimensions ({how}){_difference(described.shape, whole, exact=exact)}"
    )


def _difference(theirs: Sequence[int], ours: Sequence[int], *, exact: bool) -> str:
    """Of shapes with as many dimensions; of others their number says it."""
    if len(theirs) != len(ours):
        return ""
    places = [place for place, dim in enumerate(theirs) if dim != ours[place] and (exact or dim != -1)]
    variable = any(theirs[place] == -1 for place in places)
    rule = ": where the model's is -1 that of an output is -1, too" if variable else ""
    return f"; they differ in dimension {', '.join(map(str, places))}{rule}"


def _text(shape: Sequence[int]) -> str:
    return f"[{','.join(map(str, shape))}]"
