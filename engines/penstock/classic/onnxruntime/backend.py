"""Triton's `onnxruntime` backend: model.onnx, or the folder model.onnx/ with external data beside the model.

docs/backends.md says what of it there is.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from mmap import mmap
from pathlib import Path
from typing import Any

from penstock.classic.base import Backend, BackendModel, InstanceContext, ModelContext
from penstock.classic.described import check, complete, default_max_batch_size, is_complete
from penstock.classic.model_config import ModelConfig
from penstock.classic.onnxruntime.description import describe, describe_file, open_session
from penstock.classic.onnxruntime.files import external_data, map_linked, model_file
from penstock.classic.onnxruntime.instance import OnnxRuntimeInstance
from penstock.classic.onnxruntime.options import session_options
from penstock.classic.onnxruntime.providers import providers
from penstock.classic.parameters import check_options, flag, strings

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
