"""Triton's `dali` backend: serialized pipelines. docs/backends.md says what of it there is."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.classic.base import Backend, BackendModel, InstanceContext, ModelContext
from penstock.classic.dali.configuring import check, complete, split_outputs
from penstock.classic.dali.definition import read_definition
from penstock.classic.dali.files import serialized_pipeline
from penstock.classic.dali.instance import DaliInstance
from penstock.classic.dali.library import explain, load_dali
from penstock.classic.described import is_complete
from penstock.classic.model_config import ModelConfig
from penstock.classic.parameters import check_options, flag, strings, thread_count, threads_per_instance

_REFUSED = {"plugin_libs": "libraries of custom operators are not loaded"}


class DaliBackend(Backend):
    """Option: `release_after_unload=true` gives DALI's memory pools back when its last model has been unloaded."""

    def __init__(self, options: Mapping[str, str]) -> None:
        """Raises ValueError for an unknown option."""
        super().__init__(options)
        for name, reason in _REFUSED.items():
            if name in options:
                raise ValueError(f"the option '{name}' of the dali backend is not supported: {reason}")
        check_options("dali", options, {"release_after_unload"})
        self._models = _LoadedModels(flag(options, "release_after_unload", False))

    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        if not is_complete(config):
            complete(config, read_definition(serialized_pipeline(config, version_folder)))

    def load_model(self, context: ModelContext) -> DaliModel:
        return DaliModel(context.config, serialized_pipeline(context.config, context.version_folder), self._models)


class _LoadedModels:
    def __init__(self, releases: bool) -> None:
        self._releases = releases
        self._count = 0
        self._lock = threading.Lock()

    def add(self) -> None:
        with self._lock:
            self._count += 1

    def remove(self) -> None:
        with self._lock:
            self._count -= 1
            if self._releases and not self._count:
                load_dali("nvidia.dali.backend").ReleaseUnusedMemory()


class DaliModel(BackendModel):
    def __init__(self, config: ModelConfig, serialized: bytes, models: _LoadedModels) -> None:
        self._pipeline_class = load_dali("nvidia.dali.pipeline").Pipeline
        self._config = config
        self._serialized = serialized
        self._split = split_outputs(config)
        self._threads = thread_count(strings(config), "num_threads") or threads_per_instance(config)
        check(config, read_definition(serialized))
        self._models = models
        models.add()

    def load_instance(self, context: InstanceContext) -> DaliInstance:
        device = context.device_id if context.kind == "GPU" else None
        return DaliInstance(lambda: self._build(device), self._config, self._split)

    def _build(self, device: int | None) -> Any:
        """Runs one batch at a time: what is prefetched would wait for requests that may not come."""
        try:
            pipeline = self._pipeline_class.deserialize(
                serialized_pipeline=self._serialized,
                batch_size=max(1, self._config.max_batch_size),
                num_threads=self._threads,
                device_id=device,
                exec_pipelined=False,
                exec_async=False,
                prefetch_queue_depth=1,
            )
            pipeline.build()
        except Exception as error:
            where = "the CPU (KIND_CPU)" if device is None else f"GPU {device}"
            raise ValueError(
                f"the pipeline of model '{self._config.name}' cannot be built for {where}: {explain(error)}"
            ) from error
        return pipeline

    def unload(self) -> None:
        self._models.remove()
