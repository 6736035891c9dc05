"""Triton's `tensorflow` backend: SavedModels and GraphDefs. docs/backends.md says what of it there is."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path

from penstock.classic.base import Backend, BackendModel, InstanceContext, ModelContext
from penstock.classic.described import check, complete, default_max_batch_size, is_complete
from penstock.classic.model_config import ModelConfig
from penstock.classic.openvino.backend import OpenVINOBackend
from penstock.classic.parameters import check_options, flag, number
from penstock.classic.tensorflow.graph import LoadedGraph, load_graph
from penstock.classic.tensorflow.instance import TensorFlowInstance
from penstock.classic.tensorflow.settings import TensorFlowSettings, read_settings, runtime

logger = logging.getLogger(__name__)

_FOR_GPUS = {"allow-soft-placement", "gpu-memory-fraction"}
_OPTIONS = _FOR_GPUS | {"runtime", "version"}


class TensorFlowBackend(Backend):
    """Options: `default-max-batch-size`; `runtime`, tensorflow or openvino, for models without TF_RUNTIME; `version`,
    which can only be 2; `allow-soft-placement` and `gpu-memory-fraction` are for GPUs and have no effect."""

    def __init__(self, options: Mapping[str, str]) -> None:
        """Raises ValueError for an unknown option, and for a value that cannot be."""
        super().__init__(options)
        check_options("tensorflow", options, _OPTIONS)
        if options.get("version", "2") != "2":
            raise ValueError(f"the tensorflow backend runs TensorFlow 2, not version '{options['version'][:64]}'")
        flag(options, "allow-soft-placement", True)
        number(options, "gpu-memory-fraction", 0.0)
        kept = options.keys() & {"default-max-batch-size"}
        self._openvino = OpenVINOBackend({key: options[key] for key in kept})

    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        if is_complete(config):
            return
        if runtime(config, self.options) == "openvino":
            self._openvino.auto_complete(config, version_folder)
            return
        settings = read_settings(config, version_folder)
        if settings.is_graph_def:
            raise ValueError(
                f"model '{config.name}' is a GraphDef, which does not tell its inputs and outputs: config.pbtxt must"
            )
        graph = load_graph(settings, config)
        try:
            complete(config, graph.describe(config), default_max_batch_size(self.options))
        finally:
            graph.close()

    def load_model(self, context: ModelContext) -> BackendModel:
        found = runtime(context.config, self.options)
        logger.info("model '%s' is run by %s", context.name, "OpenVINO" if found == "openvino" else "TensorFlow")
        if found == "openvino":
            return self._openvino.load_model(context)
        return TensorFlowModel(context.config, read_settings(context.config, context.version_folder))


class TensorFlowModel(BackendModel):
    """Makes a session for each MAX_SESSION_SHARE_COUNT instances; each has the weights once more."""

    def __init__(self, config: ModelConfig, settings: TensorFlowSettings) -> None:
        self._config = config
        self._settings = settings
        self._graphs: list[LoadedGraph] = []
        self._users = 0
        """Instances of the last graph."""
        self._loading = threading.Lock()

    def load_instance(self, context: InstanceContext) -> TensorFlowInstance:
        context.require_cpu("the tensorflow backend computes on the CPU")
        with self._loading:
            if not self._graphs or self._users >= self._settings.session_share:
                self._graphs.append(self._load())
                self._users = 0
            self._users += 1
            return TensorFlowInstance(self._graphs[-1], self._config)

    def _load(self) -> LoadedGraph:
        graph = load_graph(self._settings, self._config)
        try:
            check(self._config, graph.describe(self._config))
        except BaseException:
            graph.close()
            raise
        return graph

    def unload(self) -> None:
        for graph in self._graphs:
            graph.close()
        self._graphs.clear()
