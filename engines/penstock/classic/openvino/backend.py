"""Triton's `openvino` backend. docs/builtin_backends.md lists what it supports."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.classic.base import Backend, BackendInstance, BackendModel, Batch, InstanceContext, ModelContext
from penstock.classic.batching.ragged import generated_inputs
from penstock.classic.batching.sequences.controls import server_inputs, state_outputs
from penstock.classic.frameworks import (
    DescribedModel,
    DescribedTensor,
    Scalars,
    check,
    complete,
    default_max_batch_size,
    is_complete,
    scalars_of,
    wanted_outputs,
)
from penstock.classic.model_config import ModelConfig
from penstock.classic.model_files import model_path
from penstock.classic.onnxruntime.files import external_data
from penstock.classic.openvino.options import OpenVINOOptions, core, explain, load_openvino, options
from penstock.classic.parameters import check_options
from penstock.classic.tensors import NUMPY_TYPES, Array
from penstock.engines.errors import EngineError, InvalidRequestError, PenstockError

logger = logging.getLogger(__name__)

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


FILENAMES = (
    "model.xml",
    "model.onnx",
    "model.pdmodel",
    "model.savedmodel",
    "model.graphdef",
    "model.pb",
    "model.tflite",
)
_FROZEN_GRAPHS = frozenset({".graphdef", ".pb", ".pbtxt"})


def read_model(config: ModelConfig, version_folder: Path) -> Any:
    """An ov.Model. Raises ValueError when there is none that OpenVINO can read."""
    path = model_path(config, version_folder, *FILENAMES)
    if path.is_dir() and path.suffix == ".onnx":
        path /= "model.onnx"
    if path.suffix == ".onnx":
        external_data(path, version_folder)  # refuses files elsewhere
    try:
        model = core().read_model(str(path))
    except Exception as error:
        raise ValueError(f"'{path.name}' cannot be loaded: {explain(error)}") from error
    if path.suffix in _FROZEN_GRAPHS:
        _call_as_their_operators(model)
    return model


def _call_as_their_operators(model: Any) -> None:
    """Tensors of a graph are called `name:0`, after the operator's first output; configurations write `name`."""
    for port in (*model.inputs, *model.outputs):
        names = port.get_names()
        port.get_tensor().set_names(names | {name.removesuffix(":0") for name in names})


_BF16 = NUMPY_TYPES["BF16"]
_MOST_TEXT_BYTES = 256 * 1024 * 1024


def to_tensor(name: str, array: Array) -> Any:
    """An ov.Tensor, over the array's memory where that is possible. Raises InvalidRequestError for text that cannot
    be passed."""
    ov = load_openvino()
    if array.dtype.hasobject:
        return _text_tensor(name, array)
    array = np.asarray(array, order="C")  # a scalar stays one
    if array.dtype == _BF16:
        return ov.Tensor(array.view(np.int16), ov.Shape(array.shape), ov.Type.bf16)
    return ov.Tensor(array, shared_memory=array.flags.writeable)


def _text_tensor(name: str, array: Array) -> Any:
    """Strings pass through numpy's own, which all have the size of the longest one and end at their last byte."""
    ov = load_openvino()
    items: list[bytes] = array.ravel().tolist()
    if max(map(len, items), default=0) * len(items) > _MOST_TEXT_BYTES:
        raise InvalidRequestError(f"the strings of input '{name}' are too many for the length of its longest one")
    if any(item.endswith(b"\0") for item in items):
        raise InvalidRequestError(f"input '{name}' has a string that ends with a zero byte, which cannot be passed")
    tensor = ov.Tensor(ov.Type.string, ov.Shape(array.shape))
    if items:
        tensor.bytes_data = np.array(items, np.bytes_).reshape(array.shape)
    return tensor


def from_tensor(tensor: Any) -> Array:
    """A copy: the next execution writes to the same memory."""
    kind = tensor.get_element_type().get_type_name()
    if kind == "string":
        return np.asarray(tensor.bytes_data).astype(np.object_)
    if kind == "bf16":
        return np.array(tensor.data.view(np.uint16)).view(_BF16)
    return np.array(tensor.data)


class OpenVINOBackend(Backend):
    """Options: `default-max-batch-size`; `cache-dir`, a folder for compiled models."""

    def __init__(self, options: Mapping[str, str]) -> None:
        """Raises ValueError for an unknown option."""
        super().__init__(options)
        check_options("openvino", options, {"cache-dir"})

    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        chosen = options(config, self.options)
        model_path(config, version_folder, *FILENAMES)
        if is_complete(config):
            return
        model = _prepared(config, version_folder, chosen)
        complete(config, describe(model, _names(config)), default_max_batch_size(self.options))

    def load_model(self, context: ModelContext) -> OpenVINOModel:
        chosen = options(context.config, self.options)
        return OpenVINOModel(_prepared(context.config, context.version_folder, chosen), context.config, chosen)


class OpenVINOModel(BackendModel):
    """The instances share the compiled model, and so the weights; it has a stream of threads for each of them."""

    def __init__(self, model: Any, config: ModelConfig, options: OpenVINOOptions) -> None:
        self._config = config
        self._options = options
        self._described = _checked(model, config, options)
        try:
            self._compiled = core().compile_model(model, options.device, dict(options.properties))
        except Exception as error:
            raise ValueError(f"model '{config.name}' cannot be compiled: {explain(error)}") from error
        self._creating = threading.Lock()

    def load_instance(self, context: InstanceContext) -> OpenVINOInstance:
        context.require_cpu("the parameter TARGET_DEVICE names OpenVINO's devices")
        with self._creating:
            request = self._compiled.create_infer_request()
        return OpenVINOInstance(request, self._config, self._described, self._options)

    def unload(self) -> None:
        del self._compiled


def _prepared(config: ModelConfig, version_folder: Path, options: OpenVINOOptions) -> Any:
    """The model with the shapes that the configuration asks for."""
    model = read_model(config, version_folder)
    reshape(model, config, static_batch=options.static_batch, to_config=options.reshapes)
    return model


def _names(config: ModelConfig) -> list[str]:
    inputs = (*config.input, *server_inputs(config), *generated_inputs(config))
    return [tensor.name for tensor in (*inputs, *config.output, *state_outputs(config))]


def _checked(model: Any, config: ModelConfig, options: OpenVINOOptions) -> DescribedModel:
    """What the model tells. Raises ValueError when the configuration is not one of it."""
    described = describe(model, _names(config))
    check(config, _with_any_batch(described) if options.static_batch else described)
    return described


def _with_any_batch(described: DescribedModel) -> DescribedModel:
    """As if its batch size were variable: requests have any, up to the model's."""

    def opened(tensors: Any) -> Any:
        return tuple(replace(tensor, shape=(-1, *tensor.shape[1:])) for tensor in tensors)

    return DescribedModel(opened(described.inputs), opened(described.outputs))


class OpenVINOInstance(BackendInstance):
    def __init__(self, request: Any, config: ModelConfig, described: DescribedModel, options: OpenVINOOptions) -> None:
        self._request = request
        self._name = config.name
        self._static_batch = config.max_batch_size if options.static_batch else 0
        self._pads = options.pads
        self._on_cpu = options.device == "CPU"
        self._inputs = {tensor.name: index for index, tensor in enumerate(described.inputs)}
        outputs = [*config.output, *state_outputs(config)]
        places = {tensor.name: index for index, tensor in enumerate(described.outputs)}
        self._outputs = {tensor.name: places[tensor.name] for tensor in outputs}
        self._states = {state.output_name for state in config.sequence_batching.state}
        self._scalars = Scalars(scalars_of(described.inputs), scalars_of(described.outputs), outputs)
        self._keeps_state = bool(request.query_state())

    def execute(self, batch: Batch) -> None:
        feed = batch.gather()
        rows = len(next(iter(feed.values()))) if self._static_batch else 0
        self._scalars.for_model(feed)
        names = wanted_outputs(batch.calls, tuple(self._outputs), self._states)
        try:
            self._infer(feed, rows)
            outputs = {name: self._output(self._outputs[name]) for name in names}
        except PenstockError:
            raise
        except Exception as error:
            raise self._explained(error) from error
        self._scalars.as_configured(outputs)
        batch.scatter({name: array[:rows] for name, array in outputs.items()} if rows else outputs)

    def _infer(self, feed: Mapping[str, Array], rows: int) -> None:
        if self._keeps_state:
            # what a request has left behind is nothing to the next one
            self._request.reset_state()
        # the request only points to their memory, which must last until it has been read
        tensors = {name: to_tensor(name, self._padded(array, rows) if rows else array) for name, array in feed.items()}
        for name, tensor in tensors.items():
            self._request.set_input_tensor(self._inputs[name], tensor)
        self._request.start_async()
        self._request.wait()

    def _padded(self, array: Array, rows: int) -> Array:
        """Filled up to the one batch size that the model has; what the added rows give is dropped."""
        missing = self._static_batch - rows
        if not missing:
            return array
        if not self._pads:
            raise InvalidRequestError(
                f"model '{self._name}' takes batches of {self._static_batch} only, and this one has {rows}: set"
                " ENABLE_BATCH_PADDING to YES"
            )
        return np.concatenate([array, np.repeat(array[-1:], missing, axis=0)])

    def _explained(self, error: Exception) -> PenstockError:
        text = f"model '{self._name}' failed: {explain(error)}"
        # an operator that fails on a CPU fails for the data it was given
        if self._on_cpu and isinstance(error, RuntimeError):
            return InvalidRequestError(text)
        logger.error("%s", text)
        return EngineError(text)

    def _output(self, index: int) -> Array:
        return from_tensor(self._request.get_output_tensor(index))

    def unload(self) -> None:
        # its memory is what the model computes in
        del self._request
