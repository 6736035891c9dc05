"""TensorRT and CUDA's runtime, imported when the first model needs them."""

from __future__ import annotations

from typing import Any

from penstock.classic.frameworks import load_package
from penstock.engines.errors import EngineError

_OLDEST = 10
_INSTALL = "'penstock-server[tensorrt]' cuda-python, with the version of TensorRT that the plan was built with"


def load_tensorrt() -> Any:
    """The module `tensorrt`. Raises ValueError that says how to install it."""
    tensorrt = _load("tensorrt")
    major = str(tensorrt.__version__).partition(".")[0]
    if not major.isdecimal() or int(major) < _OLDEST:
        raise ValueError(f"TensorRT {tensorrt.__version__} is too old: {_OLDEST} or newer is needed")
    return tensorrt


def load_cuda() -> Cuda:
    """Raises ValueError that says how to install cuda-python."""
    return Cuda(_load("cuda.bindings.runtime"))


def _load(module: str) -> Any:
    return load_package(module, "TensorRT plans", _INSTALL)


class Cuda:
    """CUDA's runtime, whose functions give `(error, result)` in Python."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime

    def call(self, function: str, *arguments: Any) -> Any:
        """Raises EngineError with CUDA's text."""
        error, *result = getattr(self._runtime, function)(*arguments)
        if error != self._runtime.cudaError_t.cudaSuccess:
            _, text = self._runtime.cudaGetErrorString(error)
            raise EngineError(f"{function} failed: {text.decode()}")
        return result[0] if result else None

    def to_device(self, device: int, host: int, size: int, stream: Any) -> None:
        self.call("cudaMemcpyAsync", device, host, size, self._runtime.cudaMemcpyKind.cudaMemcpyHostToDevice, stream)

    def to_host(self, host: int, device: int, size: int, stream: Any) -> None:
        self.call("cudaMemcpyAsync", host, device, size, self._runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost, stream)


class DeviceBuffer:
    """Memory of a GPU that grows with what is put into it. Used by one thread, with its device set."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._size = 0
        self.address = 0

    def reserve(self, size: int) -> int:
        """The address of at least this many bytes (of one, where none are needed); contents are lost when it grows."""
        if size > self._size or not self.address:
            self.free()
            self.address = int(self._cuda.call("cudaMalloc", max(size, 1)))
            self._size = size
        return self.address

    def free(self) -> None:
        if self.address:
            address, self.address, self._size = self.address, 0, 0
            self._cuda.call("cudaFree", address)
