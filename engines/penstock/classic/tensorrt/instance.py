"""One instance: a stream, device memory for each tensor, and an execution context for each of its profiles."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.classic.base import BackendInstance, Batch
from penstock.classic.batching.sequences.controls import state_outputs
from penstock.classic.described import wanted_outputs
from penstock.classic.model_config import ModelConfig
from penstock.classic.tensorrt.engine import Bounds, Engine
from penstock.classic.tensorrt.library import Cuda, DeviceBuffer
from penstock.classic.tensors import NUMPY_TYPES, Array
from penstock.engines.errors import EngineError, InvalidRequestError, UnsupportedError


class TensorRTInstance(BackendInstance):
    def __init__(
        self, cuda: Cuda, engine: Engine, config: ModelConfig, device_id: int, profiles: Sequence[int]
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
        self._contexts: list[tuple[Any, dict[str, Bounds]]] = []
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
            found = next(filter(None, misfits), "")
            if not found:
                return context
            misfit = misfit or found
        raise InvalidRequestError(misfit)

    def _run(self, context: Any, feed: Mapping[str, Array], wanted: Sequence[str]) -> dict[str, Array]:
        for name, array in feed.items():
            if not context.set_input_shape(name, array.shape):
                raise EngineError(f"TensorRT refuses the shape {list(array.shape)} of '{name}'")
            address = self._bind(context, name, array.nbytes)
            self._cuda.to_device(address, array.ctypes.data, array.nbytes, self._stream)
        found = {name: self._output(context, name) for name in self._types}
        # the engine computes all of them, wanted or not
        addresses = {name: self._bind(context, name, array.nbytes) for name, array in found.items()}
        if not context.execute_async_v3(int(self._stream)):
            raise EngineError(f"TensorRT could not execute model '{self._name}'")
        for name in wanted:
            array = found[name]
            self._cuda.to_host(array.ctypes.data, addresses[name], array.nbytes, self._stream)
        self._cuda.call("cudaStreamSynchronize", self._stream)
        return {name: found[name] for name in wanted}

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


def _misfit(name: str, shape: Sequence[int], bounds: Bounds) -> str:
    """What is wrong with the shape; empty if nothing is."""
    about = f"request specifies invalid shape for input '{name}'. Error details: model expected "
    if len(shape) != len(bounds.lowest):
        return f"{about}{len(bounds.lowest)} dimensions but received {len(shape)}"
    for index, (dim, low, high) in enumerate(zip(shape, bounds.lowest, bounds.highest, strict=True)):
        if not low <= dim <= high:
            return f"{about}the shape of dimension {index} to be between {low} and {high} but received {dim}"
    return ""
