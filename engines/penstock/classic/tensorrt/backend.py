"""Triton's `tensorrt` backend: plan files on NVIDIA GPUs. docs/backends.md says what of it there is."""

from __future__ import annotations

import threading
from pathlib import Path

from penstock.classic.base import Backend, BackendModel, InstanceContext, ModelContext
from penstock.classic.described import check, complete, is_complete
from penstock.classic.model_config import ModelConfig
from penstock.classic.tensorrt.engine import Engine, plan_file
from penstock.classic.tensorrt.instance import TensorRTInstance
from penstock.classic.tensorrt.library import Cuda, load_cuda, load_tensorrt


class TensorRTBackend(Backend):
    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        """The batch size is the largest one of the engine's profiles."""
        if is_complete(config):
            return
        engine = Engine(load_tensorrt(), plan_file(config, version_folder))
        complete(config, engine.describe(), engine.max_batch_size())

    def load_model(self, context: ModelContext) -> TensorRTModel:
        return TensorRTModel(load_cuda(), plan_file(context.config, context.version_folder), context.config)


class TensorRTModel(BackendModel):
    def __init__(self, cuda: Cuda, path: Path, config: ModelConfig) -> None:
        self._cuda = cuda
        self._path = path
        self._config = config
        self._engines: dict[int, Engine] = {}
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

    def _engine(self, device_id: int) -> Engine:
        with self._loading:
            if device_id not in self._engines:
                self._cuda.call("cudaSetDevice", device_id)
                self._engines[device_id] = Engine(load_tensorrt(), self._path)
            return self._engines[device_id]

    def _profiles(self, instance: str, count: int) -> list[int]:
        """Those that the instance's group names in `profile`; the first one if it names none."""
        group = instance.rpartition("_")[0]
        names = next((list(found.profile) for found in self._config.instance_group if found.name == group), [])
        profiles = []
        for name in names or ["0"]:
            if not name.isdecimal() or int(name) >= count:
                raise ValueError(f"instance group '{group}' has the profile '{name}'; the engine has 0 to {count - 1}")
            profiles.append(int(name))
        return profiles

    def unload(self) -> None:
        self._engines.clear()
