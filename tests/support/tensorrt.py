"""Stand-ins for the packages `tensorrt` (10 and later) and `cuda.bindings.runtime`: their signatures, no GPU.

`StandInTensorRT` "deserialises" a plan that is a name in `plans`; a StandInEngine computes with numpy on memory that
`StandInCudaRuntime` hands out. Whatever the real ones would refuse by returning False, None or an error code, these do
too. Checked against the packages' documented Python API; neither is proof that a GPU does the same.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from penstock.classic.tensors import Array

Profile = Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
"""Smallest, best and largest shape of each input."""


class DataType(Enum):
    FLOAT = np.float32
    HALF = np.float16
    INT32 = np.int32
    FP8 = np.void


class TensorIOMode(Enum):
    NONE = 0
    INPUT = 1
    OUTPUT = 2


class TensorFormat(Enum):
    LINEAR = 0
    CHW32 = 5


@dataclass
class StandInEngine:
    """y = f(x...) for each output, over whole arrays."""

    inputs: Mapping[str, tuple[int, ...]]
    outputs: Mapping[str, tuple[int, ...]]
    compute: Callable[[Mapping[str, Array]], Mapping[str, Array]]
    profiles: Sequence[Profile]
    dtype: DataType = DataType.FLOAT
    shape_tensors: frozenset[str] = frozenset()
    formats: Mapping[str, TensorFormat] = field(default_factory=dict)
    memory_for_contexts: int = 8

    @property
    def num_io_tensors(self) -> int:
        return len(self.inputs) + len(self.outputs)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.profiles)

    def get_tensor_name(self, index: int) -> str:
        return [*self.inputs, *self.outputs][index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return self.dtype

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return {**self.inputs, **self.outputs}[name]

    def get_tensor_format(self, name: str) -> TensorFormat:
        return self.formats.get(name, TensorFormat.LINEAR)

    def is_shape_inference_io(self, name: str) -> bool:
        return name in self.shape_tensors

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        assert -1 in self.inputs[name], "what is documented is for variable dimensions"
        return list(self.profiles[profile_index][name])

    def create_execution_context(self) -> StandInContext | None:
        if not self.memory_for_contexts:
            return None
        self.memory_for_contexts -= 1
        return StandInContext(self)


class StandInContext:
    def __init__(self, engine: StandInEngine) -> None:
        self._engine = engine
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self.profile = 0
        self.executions = 0

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert isinstance(stream_handle, int)
        self.profile = profile_index
        return profile_index < self._engine.num_optimization_profiles

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        lowest, _, highest = self._engine.profiles[self.profile][name]
        self._shapes[name] = shape
        return all(low <= dim <= high for low, dim, high in zip(lowest, shape, highest, strict=True))

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if name in self._shapes:
            return self._shapes[name]
        batch = self._shapes[next(iter(self._engine.inputs))][0]
        # a batch dimension is that of the engine's first input; others that vary depend on the data
        first, *others = self._engine.outputs[name]
        return (batch if first == -1 else first, *others)

    def set_tensor_address(self, name: str, memory: int) -> bool:
        assert isinstance(memory, int)
        self._addresses[name] = memory
        return memory != 0

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert isinstance(stream_handle, int)
        names = {*self._engine.inputs, *self._engine.outputs}
        if self._addresses.keys() != names:
            return False
        found = self._engine.compute({name: self._array(name) for name in self._engine.inputs})
        for name, array in found.items():
            self._array(name)[...] = array
        self.executions += 1
        return True

    def _array(self, name: str) -> Array:
        dtype: np.dtype[Any] = np.dtype(self._engine.dtype.value)
        shape = self.get_tensor_shape(name)
        size = int(np.prod(shape)) * dtype.itemsize
        memory: Any = (ctypes.c_char * size).from_address(self._addresses[name])
        found: Array = np.frombuffer(memory, dtype).reshape(shape)
        return found


class StandInTensorRT:
    """The module."""

    __version__ = "10.9.0.34"
    DataType = DataType
    TensorIOMode = TensorIOMode
    TensorFormat = TensorFormat

    class Logger:
        WARNING = 2

        def __init__(self, min_severity: int) -> None:
            self.min_severity = min_severity

    def __init__(self, **plans: StandInEngine) -> None:
        self._plans = {name.encode(): engine for name, engine in plans.items()}
        self.deserialised = 0

    def init_libnvinfer_plugins(self, logger: Logger, namespace: str) -> bool:
        return True

    def Runtime(self, logger: Logger) -> StandInTensorRT:
        return self

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> StandInEngine | None:
        self.deserialised += 1
        return self._plans.get(serialized_engine)


class CudaError(Enum):
    cudaSuccess = 0
    cudaErrorMemoryAllocation = 2


class MemcpyKind(Enum):
    cudaMemcpyHostToDevice = 1
    cudaMemcpyDeviceToHost = 2


class Stream:
    def __int__(self) -> int:
        return 77


class StandInCudaRuntime:
    """The module: each function gives (error, result) or (error,)."""

    cudaError_t = CudaError
    cudaMemcpyKind = MemcpyKind

    def __init__(self, memory: int = 1 << 20) -> None:
        self.free_memory = memory
        self.allocations: dict[int, Any] = {}
        self.streams = 0
        self.devices: list[int] = []
        self.copied = dict.fromkeys(MemcpyKind, 0)

    def cudaSetDevice(self, device: int) -> tuple[CudaError]:
        self.devices.append(device)
        return (CudaError.cudaSuccess,)

    def cudaMalloc(self, size: int) -> tuple[CudaError, int | None]:
        if size > self.free_memory:
            return CudaError.cudaErrorMemoryAllocation, None
        memory = ctypes.create_string_buffer(size)
        address = ctypes.addressof(memory)
        self.allocations[address] = memory
        return CudaError.cudaSuccess, address

    def cudaFree(self, devPtr: int) -> tuple[CudaError]:
        del self.allocations[devPtr]
        return (CudaError.cudaSuccess,)

    def cudaMemcpyAsync(self, dst: int, src: int, count: int, kind: MemcpyKind, stream: Stream) -> tuple[CudaError]:
        device = dst if kind is MemcpyKind.cudaMemcpyHostToDevice else src
        assert count <= len(self.allocations[device])
        ctypes.memmove(dst, src, count)
        self.copied[kind] += 1
        return (CudaError.cudaSuccess,)

    def cudaStreamCreate(self) -> tuple[CudaError, Stream]:
        self.streams += 1
        return CudaError.cudaSuccess, Stream()

    def cudaStreamSynchronize(self, stream: Stream) -> tuple[CudaError]:
        return (CudaError.cudaSuccess,)

    def cudaStreamDestroy(self, stream: Stream) -> tuple[CudaError]:
        self.streams -= 1
        return (CudaError.cudaSuccess,)

    def cudaGetErrorString(self, error: CudaError) -> tuple[CudaError, bytes]:
        return CudaError.cudaSuccess, b"out of memory"
