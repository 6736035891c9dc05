"""A deserialised engine: what it says of its tensors and of its optimization profiles."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.classic.described import DescribedModel, DescribedTensor
from penstock.classic.model_config import ModelConfig
from penstock.classic.model_files import model_path, not_found

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
class Bounds:
    """Of an input's dimensions in a profile, both included."""

    lowest: tuple[int, ...]
    highest: tuple[int, ...]


def plan_file(config: ModelConfig, version_folder: Path) -> Path:
    """`default_model_filename` (model.plan) in the version's folder. Raises ValueError when it is not there."""
    path = model_path(config, version_folder, FILENAME)
    if not path.is_file():
        raise not_found(config, version_folder, path)
    return path


class Engine:
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

    def bounds(self, profile: int) -> dict[str, Bounds]:
        """Of every input, in this profile."""
        found = {}
        for name in filter(self._is_input, self.names):
            shape = tuple(self._engine.get_tensor_shape(name))
            # profiles are for variable dimensions
            if -1 in shape:
                lowest, _, highest = self._engine.get_tensor_profile_shape(name, profile)
                found[name] = Bounds(tuple(lowest), tuple(highest))
            else:
                found[name] = Bounds(shape, shape)
        return found

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
