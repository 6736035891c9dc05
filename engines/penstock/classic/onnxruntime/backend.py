"""Triton's `onnxruntime` backend: model.onnx, or the folder model.onnx/ with external data beside the model.

docs/builtin_backends.md lists what it supports.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np

from penstock.classic.base import Backend, BackendInstance, BackendModel, Batch, InstanceContext, ModelContext
from penstock.classic.batching.sequences.controls import state_outputs
from penstock.classic.frameworks import (
    DescribedModel,
    DescribedTensor,
    Scalars,
    check,
    complete,
    default_max_batch_size,
    is_complete,
    scalars_of,
    to_bytes,
    to_text,
    wanted_outputs,
)
from penstock.classic.model_config import ModelConfig
from penstock.classic.onnxruntime.files import external_data, map_linked, model_file
from penstock.classic.onnxruntime.options import (
    FAIL,
    INVALID_ARGUMENT,
    explain,
    load_onnxruntime,
    providers,
    run_options,
    session_options,
)
from penstock.classic.parameters import check_options, flag, strings
from penstock.classic.tensors import NUMPY_TYPES, Array
from penstock.engines.errors import EngineError, InvalidRequestError

logger = logging.getLogger(__name__)

_DATATYPES = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(bfloat16)": "BF16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
}


def describe(session: Any) -> DescribedModel:
    """Tensors of an InferenceSession. Inputs with a value of their own (overridable initializers) are optional."""
    return DescribedModel(
        inputs=tuple(map(_tensor, session.get_inputs())),
        outputs=tuple(map(_tensor, session.get_outputs())),
        optional_inputs=tuple(map(_tensor, session.get_overridable_initializers())),
    )


def describe_file(path: Path, data: Iterable[str]) -> DescribedModel:
    """Of the model in a file with external `data`, opened for nothing else. Raises ValueError when that fails."""
    onnxruntime = load_onnxruntime()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.disable_prepacking", "1")
    maps = map_linked(path, data, options)
    described = describe(open_session(path, options, [("CPUExecutionProvider", {})]))
    for file in maps:
        file.close()
    return described


def open_session(path: Path, options: Any, providers: list[tuple[str, dict[str, str]]]) -> Any:
    """An InferenceSession that runs on all of `providers`, which must be available. Raises ValueError."""
    onnxruntime = load_onnxruntime()
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=providers, enable_fallback=0)
    except Exception as error:
        _, text = explain(error)
        raise ValueError(f"'{path.name}' cannot be loaded: {text.replace(str(path), path.name)}") from error
    # it goes on without a provider whose libraries it cannot load
    lost = [name for name, _ in providers if name not in session.get_providers()]
    if lost:
        raise ValueError(
            f"onnxruntime could not start its {lost[0]}: the libraries it needs (CUDA, cuDNN, TensorRT, OpenVINO) are"
            " missing, or not of the versions it was built for"
        )
    return session


def _tensor(described: Any) -> DescribedTensor:
    shape = tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in described.shape)
    return DescribedTensor(described.name, _DATATYPES.get(described.type, described.type), shape)


_ONNX_BFLOAT16 = 16
"""TensorProto.BFLOAT16."""


def to_value(array: Array) -> Any:
    """An OrtValue over the array's memory, which must outlive it; numpy's own arrays know no bfloat16."""
    value = load_onnxruntime().OrtValue
    if array.dtype == NUMPY_TYPES["BF16"]:
        return value.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), _ONNX_BFLOAT16)
    return value.ortvalue_from_numpy(array)


def from_value(value: Any) -> Array:
    """A copy of an OrtValue in the CPU's memory."""
    if value.data_type() != "tensor(bfloat16)":
        numbers: Array = value.numpy()
        return numbers
    array = np.empty(value.shape(), NUMPY_TYPES["BF16"])
    ctypes.memmove(array.ctypes.data, value.data_ptr(), array.nbytes)
    return array


_SHARED = "share_session_between_instances"
_OPTIONS = frozenset({"enable-global-threadpool", "intra_op_thread_count", "inter_op_thread_count"})


class OnnxRuntimeBackend(Backend):
    """Options: `default-max-batch-size`, `enable-global-threadpool` with `intra_op_thread_count` and
    `inter_op_thread_count`."""

    def __init__(self, options: Mapping[str, str]) -> None:
        """Raises ValueError for an unknown option."""
        super().__init__(options)
        check_options("onnxruntime", options, _OPTIONS)

    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        if is_complete(config):
            return
        path = model_file(config, version_folder)
        described = describe_file(path, external_data(path, version_folder))
        complete(config, described, default_max_batch_size(self.options))

    def load_model(self, context: ModelContext) -> OnnxRuntimeModel:
        config = context.config
        path = model_file(config, context.version_folder)
        options = session_options(config, self.options)
        data = map_linked(path, external_data(path, context.version_folder), options)
        return OnnxRuntimeModel(path, config, options, data)


class OnnxRuntimeModel(BackendModel):
    def __init__(self, path: Path, config: ModelConfig, options: Any, data: Sequence[mmap]) -> None:
        """`data` is kept as long as the model: `options` refer to it."""
        self._path = path
        self._data = data
        self._config = config
        self._options = options
        self._shared = flag(strings(config), _SHARED, False)
        self._sessions: dict[tuple[str, str, int], Any] = {}
        """Of each group of instances on a device, where they share one: weights are in memory once then."""
        self._opening = threading.Lock()

    def load_instance(self, context: InstanceContext) -> OnnxRuntimeInstance:
        session = self._shared_session(context) if self._shared else self._session(context)
        described = describe(session)
        check(self._config, described)
        return OnnxRuntimeInstance(session, self._config, described, on_cpu=context.kind != "GPU")

    def _shared_session(self, context: InstanceContext) -> Any:
        key = (context.name.rpartition("_")[0], context.kind, context.device_id)
        with self._opening:
            if key not in self._sessions:
                self._sessions[key] = self._session(context)
            return self._sessions[key]

    def _session(self, context: InstanceContext) -> Any:
        return open_session(self._path, self._options, providers(self._config, context))

    def unload(self) -> None:
        self._sessions.clear()


_Run = Callable[[Sequence[str], Mapping[str, Array]], Sequence[Array]]


class OnnxRuntimeInstance(BackendInstance):
    """`session.run` over numpy arrays: 4 us for an add of 16 floats, where binding inputs and outputs takes 8."""

    def __init__(self, session: Any, config: ModelConfig, described: DescribedModel, *, on_cpu: bool) -> None:
        self._session = session
        self._run_options = run_options(config)
        outputs = [*config.output, *state_outputs(config)]
        self._outputs = [tensor.name for tensor in outputs]
        self._states = {state.output_name for state in config.sequence_batching.state}
        inputs = (*described.inputs, *described.optional_inputs)
        self._text_inputs = [tensor.name for tensor in inputs if tensor.datatype == "BYTES"]
        self._text_outputs = {tensor.name for tensor in described.outputs if tensor.datatype == "BYTES"}
        self._scalars = Scalars(scalars_of(inputs), scalars_of(described.outputs), outputs)
        bfloat16 = any(tensor.datatype == "BF16" for tensor in (*inputs, *described.outputs))
        self._run: _Run = self._run_values if bfloat16 else self._run_arrays
        # an operator that fails on a CPU fails for the data it was given; on a GPU, that may be its memory
        self._callers_fault = {INVALID_ARGUMENT, FAIL} if on_cpu else {INVALID_ARGUMENT}

    def execute(self, batch: Batch) -> None:
        feed = batch.gather()
        for name in self._text_inputs:
            if name in feed:
                feed[name] = to_text(name, feed[name])
        self._scalars.for_model(feed)
        names = wanted_outputs(batch.calls, self._outputs, self._states)
        try:
            results = self._run(names, feed)
        except Exception as error:
            raise self._explained(error) from error
        outputs = dict(zip(names, results, strict=True))
        for name in self._text_outputs & outputs.keys():
            outputs[name] = to_bytes(outputs[name])
        self._scalars.as_configured(outputs)
        batch.scatter(outputs)

    def _run_arrays(self, names: Sequence[str], feed: Mapping[str, Array]) -> Sequence[Array]:
        arrays: Sequence[Array] = self._session.run(names, feed, self._run_options)
        return arrays

    def _run_values(self, names: Sequence[str], feed: Mapping[str, Array]) -> Sequence[Array]:
        binding = self._session.io_binding()
        for name, array in feed.items():
            binding.bind_ortvalue_input(name, to_value(array))
        for name in names:
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding, self._run_options)
        return [from_value(value) for value in binding.get_outputs()]

    def _explained(self, error: Exception) -> Exception:
        code, text = explain(error)
        if code in self._callers_fault:
            return InvalidRequestError(text)
        logger.error("%s", text)
        return EngineError(text)

    def unload(self) -> None:
        # its memory is the model's weights
        del self._session
