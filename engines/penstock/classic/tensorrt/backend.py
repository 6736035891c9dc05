"""Triton's `tensorrt` backend: plan files on NVIDIA GPUs. docs/builtin_backends.md lists what it supports."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.classic.base import Backend, BackendInstance, BackendModel, Batch, InstanceContext, ModelContext
from penstock.classic.batching.sequences.controls import state_outputs
from penstock.classic.frameworks import DescribedModel, DescribedTensor, check, complete, is_complete, wanted_outputs
from penstock.classic.model_config import ModelConfig
from penstock.classic.model_files import model_path, not_found
from penstock.classic.tensorrt.cuda import Cuda, DeviceBuffer, load_cuda, load_tensorrt
from penstock.classic.tensors import NUMPY_TYPES, Array
from penstock.engines.errors import EngineError, InvalidRequestError, UnsupportedError

FILENAME = "model.plan"

_DATATYPES = {
    "FLOAT": "FP32",
    "HALF": "FP16",
    "BF16": "BF16",
    "INT8": "INT8",
    "INT32": "INT32",
    "INT64": "INT64",
    "UINT8": "UINT8",
    "BOOL": "BOOL",
}
"""By the names of tensorrt.DataType; there are no datatypes for FP8 and what is smaller."""


@dataclass(frozen=True, slots=True)
class ShapeBounds:
    """Of an input's dimensions in a profile, both included."""

    lowest: tuple[int, ...]
    highest: tuple[int, ...]


def plan_file(config: ModelConfig, version_folder: Path) -> Path:
    """`default_model_filename` (model.plan) in the version's folder. Raises ValueError when it is not there."""
    path = model_path(config, version_folder, FILENAME)
    if not path.is_file():
        raise not_found(config, version_folder, path)
    return path


class PlanEngine:
    """On the device that was set when it was made. Raises ValueError for a plan that does not fit it.

    Execution contexts of one engine share its weights.
    """

    def __init__(self, tensorrt: Any, path: Path) -> None:
        self._tensorrt = tensorrt
        self._logger = tensorrt.Logger(tensorrt.Logger.WARNING)
        tensorrt.init_libnvinfer_plugins(self._logger, "")
        self._runtime = tensorrt.Runtime(self._logger)
        self._engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise ValueError(
                f"'{path.name}' cannot be loaded: it was built with another version of TensorRT than"
                f" {tensorrt.__version__}, for another GPU, or is no plan"
            )
        self._check()

    @property
    def names(self) -> list[str]:
        return [self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)]

    def _is_input(self, name: str) -> bool:
        return bool(self._engine.get_tensor_mode(name) == self._tensorrt.TensorIOMode.INPUT)

    def _check(self) -> None:
        for name in self.names:
            if self._engine.is_shape_inference_io(name):
                raise ValueError(f"'{name}' is a shape tensor, which is not supported")
            if self._engine.get_tensor_format(name) != self._tensorrt.TensorFormat.LINEAR:
                raise ValueError(f"'{name}' has no linear format (is_non_linear_format_io), which is not supported")

    def describe(self) -> DescribedModel:
        tensors = [(self._is_input(name), self._describe(name)) for name in self.names]
        return DescribedModel(
            inputs=tuple(tensor for is_input, tensor in tensors if is_input),
            outputs=tuple(tensor for is_input, tensor in tensors if not is_input),
        )

    def _describe(self, name: str) -> DescribedTensor:
        data_type = self._engine.get_tensor_dtype(name).name
        shape = tuple(self._engine.get_tensor_shape(name))
        return DescribedTensor(name, _DATATYPES.get(data_type, data_type), shape)

    @property
    def profiles(self) -> int:
        return int(self._engine.num_optimization_profiles)

    def bounds(self, profile: int) -> dict[str, ShapeBounds]:
        """Of every input, in this profile."""
        bounds = {}
        for name in filter(self._is_input, self.names):
            shape = tuple(self._engine.get_tensor_shape(name))
            # profiles are for variable dimensions
            if -1 in shape:
                lowest, _, highest = self._engine.get_tensor_profile_shape(name, profile)
                bounds[name] = ShapeBounds(tuple(lowest), tuple(highest))
            else:
                bounds[name] = ShapeBounds(shape, shape)
        return bounds

    def max_batch_size(self) -> int:
        """The largest first dimension that all inputs take in some profile; 0 where an input has none."""
        batches = [
            min((bounds.highest[0] if bounds.highest else 0 for bounds in self.bounds(profile).values()), default=0)
            for profile in range(self.profiles)
        ]
        return max(batches, default=0)

    def create_context(self) -> Any:
        """Raises ValueError when the device's memory does not suffice."""
        context = self._engine.create_execution_context()
        if context is None:
            raise ValueError("an execution context cannot be created: too little memory on the GPU")
        return context


class TensorRTBackend(Backend):
    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        """The batch size is the largest one of the engine's profiles."""
        if is_complete(config):
            return
        engine = PlanEngine(load_tensorrt(), plan_file(config, version_folder))
        complete(config, engine.describe(), engine.max_batch_size())

    def load_model(self, context: ModelContext) -> TensorRTModel:
        return TensorRTModel(load_cuda(), plan_file(context.config, context.version_folder), context.config)


class TensorRTModel(BackendModel):
    def __init__(self, cuda: Cuda, path: Path, config: ModelConfig) -> None:
        self._cuda = cuda
        self._path = path
        self._config = config
        self._engines: dict[int, PlanEngine] = {}
        """By device: its instances share them."""
        self._loading = threading.Lock()

    def load_instance(self, context: InstanceContext) -> TensorRTInstance:
        if context.kind != "GPU":
            raise ValueError(f"instance '{context.name}' of model '{self._config.name}' must be KIND_GPU")
        engine = self._engine(context.device_id)
        check(self._config, engine.describe())
        largest = engine.max_batch_size()
        if self._config.max_batch_size > largest:
            raise ValueError(
                f"unable to load model '{self._config.name}', max_batch_size {self._config.max_batch_size} is above"
                f" the engine's {largest}"
            )
        return TensorRTInstance(
            self._cuda, engine, self._config, context.device_id, self._profiles(context.name, engine.profiles)
        )

    def _engine(self, device_id: int) -> PlanEngine:
        with self._loading:
            if device_id not in self._engines:
                self._cuda.call("cudaSetDevice", device_id)
                self._engines[device_id] = PlanEngine(load_tensorrt(), self._path)
            return self._engines[device_id]

    def _profiles(self, instance: str, count: int) -> list[int]:
        """Those that the instance's group names in `profile`; the first one if it names none."""
        group = instance.rpartition("_")[0]
        names = next((list(entry.profile) for entry in self._config.instance_group if entry.name == group), [])
        profiles = []
        for name in names or ["0"]:
            if not name.isdecimal() or int(name) >= count:
                raise ValueError(f"instance group '{group}' has the profile '{name}'; the engine has 0 to {count - 1}")
            profiles.append(int(name))
        return profiles

    def unload(self) -> None:
        self._engines.clear()


class TensorRTInstance(BackendInstance):
    def __init__(
        self, cuda: Cuda, engine: PlanEngine, config: ModelConfig, device_id: int, profiles: Sequence[int]
    ) -> None:
        self._cuda = cuda
        self._device_id = device_id
        self._name = config.name
        self._outputs = [tensor.name for tensor in (*config.output, *state_outputs(config))]
        self._states = {state.output_name for state in config.sequence_batching.state}
        described = engine.describe()
        self._types = {tensor.name: NUMPY_TYPES[tensor.datatype] for tensor in described.outputs}
        self._buffers = {name: DeviceBuffer(cuda) for name in engine.names}
        cuda.call("cudaSetDevice", device_id)
        self._stream = cuda.call("cudaStreamCreate")
        self._contexts: list[tuple[Any, dict[str, ShapeBounds]]] = []
        """With the bounds of each one's profile; the first that a batch fits is taken."""
        for profile in profiles:
            context = engine.create_context()
            if not context.set_optimization_profile_async(profile, int(self._stream)):
                raise ValueError(f"profile {profile} cannot be selected")
            self._contexts.append((context, engine.bounds(profile)))
        cuda.call("cudaStreamSynchronize", self._stream)

    def execute(self, batch: Batch) -> None:
        feed = batch.gather()
        # CUDA's current device is the thread's
        self._cuda.call("cudaSetDevice", self._device_id)
        context = self._fitting_context(feed)
        try:
            outputs = self._run(context, feed, wanted_outputs(batch.calls, self._outputs, self._states))
        except BaseException:
            # nothing may still read or write memory that the next batch takes over
            with contextlib.suppress(EngineError):
                self._cuda.call("cudaStreamSynchronize", self._stream)
            raise
        batch.scatter(outputs)

    def _fitting_context(self, feed: Mapping[str, Array]) -> Any:
        """Raises InvalidRequestError, with Triton's text, when no profile takes these shapes."""
        misfit = ""
        for context, bounds in self._contexts:
            misfits = (_misfit(name, array.shape, bounds[name]) for name, array in feed.items())
            reason = next(filter(None, misfits), "")
            if not reason:
                return context
            misfit = misfit or reason
        raise InvalidRequestError(misfit)

    def _run(self, context: Any, feed: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        for name, array in feed.items():
            if not context.set_input_shape(name, array.shape):
                raise EngineError(f"TensorRT refuses the shape {list(array.shape)} of '{name}'")
            address = self._bind(context, name, array.nbytes)
            self._cuda.to_device(address, array.ctypes.data, array.nbytes, self._stream)
        outputs = {name: self._output(context, name) for name in self._types}
        # the engine computes all of them, wanted or not
        addresses = {name: self._bind(context, name, array.nbytes) for name, array in outputs.items()}
        if not context.execute_async_v3(int(self._stream)):
            raise EngineError(f"TensorRT could not execute model '{self._name}'")
        for name in names:
            array = outputs[name]
            self._cuda.to_host(array.ctypes.data, addresses[name], array.nbytes, self._stream)
        self._cuda.call("cudaStreamSynchronize", self._stream)
        return {name: outputs[name] for name in names}

    def _output(self, context: Any, name: str) -> Array:
        shape = tuple(context.get_tensor_shape(name))
        if min(shape, default=0) < 0:
            raise UnsupportedError(f"the shape of output '{name}' depends on the data, which is not supported")
        return np.empty(shape, self._types[name])

    def _bind(self, context: Any, name: str, size: int) -> int:
        address = self._buffers[name].reserve(size)
        if not context.set_tensor_address(name, address):
            raise EngineError(f"TensorRT refuses the memory of '{name}'")
        return address

    def unload(self) -> None:
        self._cuda.call("cudaSetDevice", self._device_id)
        self._contexts.clear()
        for buffer in self._buffers.values():
            buffer.free()
        self._cuda.call("cudaStreamDestroy", self._stream)


def _misfit(name: str, shape: Sequence[int], bounds: ShapeBounds) -> str:
    """What is wrong with the shape; empty if nothing is."""
    about = f"request specifies invalid shape for input '{name}'. Error details: model expected "
    if len(shape) != len(bounds.lowest):
        return f"{about}{len(bounds.lowest)} dimensions but received {len(shape)}"
    for index, (dim, low, high) in enumerate(zip(shape, bounds.lowest, bounds.highest, strict=True)):
        if not low <= dim <= high:
            return f"{about}the shape of dimension {index} to be between {low} and {high} but received {dim}"
    return ""
