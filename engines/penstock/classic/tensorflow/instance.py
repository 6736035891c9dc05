"""One instance: runs of a session that others may share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.classic.base import BackendInstance, Batch
from penstock.classic.batching.sequences.controls import state_outputs
from penstock.classic.described import Scalars, wanted_outputs
from penstock.classic.model_config import ModelConfig
from penstock.classic.tensorflow.graph import LoadedGraph
from penstock.classic.tensorflow.library import explain, load_tensorflow
from penstock.classic.tensors import Array
from penstock.engines.errors import EngineError, InvalidRequestError

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
            found = run(*(feed[name] for name in self._graph.inputs))
        except errors.ResourceExhaustedError as error:
            raise EngineError(f"model '{self._name}' failed: {explain(error)}") from error
        except errors.OpError as error:
            # an operator that fails on a CPU fails for the data it was given
            raise InvalidRequestError(f"model '{self._name}' failed: {explain(error)}") from error
        outputs = dict(zip(names, found, strict=True))
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


def _array(found: Any) -> Array:
    # a scalar string comes as bytes
    return np.array(found, np.object_) if isinstance(found, bytes) else np.asarray(found)
