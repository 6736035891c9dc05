"""What an ov.Model tells of its tensors, and making its shapes those of the configuration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.classic.described import DescribedModel, DescribedTensor
from penstock.classic.model_config import ModelConfig
from penstock.classic.openvino.library import explain, load_openvino

_DATATYPES = {
    "boolean": "BOOL",
    "u8": "UINT8",
    "u16": "UINT16",
    "u32": "UINT32",
    "u64": "UINT64",
    "i8": "INT8",
    "i16": "INT16",
    "i32": "INT32",
    "i64": "INT64",
    "f16": "FP16",
    "bf16": "BF16",
    "f32": "FP32",
    "f64": "FP64",
    "string": "BYTES",
}


def describe(model: Any, names: Iterable[str]) -> DescribedModel:
    """Tensors may have several names: those among `names` (the configuration's) are taken first."""
    known = set(names)
    return DescribedModel(
        inputs=tuple(_tensor(port, known) for port in model.inputs),
        outputs=tuple(_tensor(port, known) for port in model.outputs),
    )


def _tensor(port: Any, known: set[str]) -> DescribedTensor:
    kind = port.get_element_type().get_type_name()
    return DescribedTensor(_name(port, known), _DATATYPES.get(kind, kind), _shape(port))


def _name(port: Any, known: set[str]) -> str:
    names = sorted(port.get_names())
    node = port.get_node()
    # an output without names is called as the operator that computes it
    producer = node.input_value(0).get_node() if node.get_type_name() == "Result" else node
    candidates = [*names, producer.get_friendly_name(), node.get_friendly_name()]
    return next((name for name in candidates if name in known), candidates[0])


def _shape(port: Any) -> tuple[int, ...]:
    shape = port.get_partial_shape()
    if shape.rank.is_dynamic:
        raise ValueError("a tensor of the model has any number of dimensions, which is not supported")
    return tuple(dim.get_length() if dim.is_static else -1 for dim in shape)


def reshape(model: Any, config: ModelConfig, *, static_batch: bool, to_config: bool) -> None:
    """Gives the inputs the configuration's batch dimension, variable or exactly `max_batch_size` (`static_batch`), and
    where `to_config` its dims too. Raises ValueError when the model cannot have them."""
    if config.batch_input or any(tensor.allow_ragged_batch for tensor in config.input):
        if static_batch or to_config:
            raise ValueError(f"model '{config.name}' has ragged inputs, whose shapes are the model's own")
        return
    if not (config.max_batch_size or to_config):
        return
    dims = {tensor.name: _model_dims(tensor) for tensor in config.input}
    batch = [config.max_batch_size if static_batch else -1] if config.max_batch_size else []
    shapes = {}
    for port in model.inputs:
        own = _shape(port)
        inner = dims.get(_name(port, set(dims))) if to_config else None
        if inner is None:
            inner = own[len(batch) :]
        if batch and not own:
            raise ValueError(f"model '{config.name}' has max_batch_size, and its input '{_name(port, set())}' no dims")
        shapes[port] = load_openvino().PartialShape([*batch, *inner])
    try:
        model.reshape(shapes)
    except Exception as error:
        raise ValueError(f"model '{config.name}' cannot have the configured shapes: {explain(error)}") from error
    if batch and not static_batch and any(_shape(port)[:1] != (-1,) for port in model.outputs):
        raise ValueError(
            f"model '{config.name}' does not support batches of any size: set max_batch_size to 0, or"
            " SKIP_OV_DYNAMIC_BATCHSIZE to YES where max_batch_size is its own batch size"
        )


def _model_dims(tensor: Any) -> Sequence[int]:
    return list(tensor.reshape.shape) if tensor.HasField("reshape") else list(tensor.dims)
