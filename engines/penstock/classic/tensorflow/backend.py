"""Triton's `tensorflow` backend: SavedModels and GraphDefs. docs/builtin_backends.md lists what it supports."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.classic.base import Backend, BackendInstance, BackendModel, Batch, InstanceContext, ModelContext
from penstock.classic.batching.sequences.controls import state_outputs
from penstock.classic.frameworks import Scalars, check, complete, default_max_batch_size, is_complete, wanted_outputs
from penstock.classic.model_config import ModelConfig
from penstock.classic.openvino.backend import OpenVINOBackend
from penstock.classic.parameters import check_options, flag, number
from penstock.classic.tensorflow.graph import (
    LoadedGraph,
    TensorFlowSettings,
    explain,
    load_graph,
    load_tensorflow,
    read_settings,
    runtime,
)
from penstock.classic.tensors import Array
from penstock.engines.errors import EngineError, InvalidRequestError

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
        chosen = runtime(context.config, self.options)
        logger.info("model '%s' is run by %s", context.name, "OpenVINO" if chosen == "openvino" else "TensorFlow")
        if chosen == "openvino":
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


_MAX_PREPARED = 32


class TensorFlowInstance(BackendInstance):
    def __init__(self, graph: LoadedGraph, config: ModelConfig) -> None:
        self._graph: LoadedGraph | None = graph
        self._name = config.name
        outputs = [*config.output, *state_outputs(config)]
        self._outputs = tuple(tensor.name for tensor in outputs)
        self._states = {state.output_name for state in config.sequence_batching.state}
        self._scalars = Scalars(_scalars(graph.inputs), _scalars(graph.outputs), outputs)
        self._prepared: dict[tuple[str, ...], Callable[..., Sequence[Array]]] = {}
        """By the outputs that are asked for: a run that is prepared takes a third of the time around the graph."""

    def execute(self, batch: Batch) -> None:
        assert self._graph is not None
        feed = batch.gather()
        self._scalars.for_model(feed)
        names = tuple(wanted_outputs(batch.calls, self._outputs, self._states))
        run = self._run(self._graph, names)
        errors = load_tensorflow().errors
        try:
            results = run(*(feed[name] for name in self._graph.inputs))
        except errors.ResourceExhaustedError as error:
            raise EngineError(f"model '{self._name}' failed: {explain(error)}") from error
        except errors.OpError as error:
            # an operator that fails on a CPU fails for the data it was given
            raise InvalidRequestError(f"model '{self._name}' failed: {explain(error)}") from error
        outputs = dict(zip(names, results, strict=True))
        for name in self._scalars.outputs.keys() & outputs.keys():
            outputs[name] = _array(outputs[name])
        self._scalars.as_configured(outputs)
        batch.scatter(outputs)

    def _run(self, graph: LoadedGraph, names: tuple[str, ...]) -> Callable[..., Sequence[Array]]:
        run = self._prepared.get(names)
        if run is None:
            if len(self._prepared) >= _MAX_PREPARED:
                self._prepared.clear()
            fetches = [graph.outputs[name] for name in names]
            run = self._prepared[names] = graph.session.make_callable(fetches, list(graph.inputs.values()))
        return run

    def unload(self) -> None:
        self._prepared.clear()
        self._graph = None


def _scalars(tensors: Mapping[str, Any]) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor.shape.rank == 0]


def _array(value: Any) -> Array:
    # a scalar string comes as bytes
    return np.array(value, np.object_) if isinstance(value, bytes) else np.asarray(value)
