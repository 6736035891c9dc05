"""One instance: an infer request of the compiled model, which its instances share."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.classic.base import BackendInstance, Batch
from penstock.classic.batching.sequences.controls import state_outputs
from penstock.classic.described import DescribedModel, Scalars, scalars_of, wanted_outputs
from penstock.classic.model_config import ModelConfig
from penstock.classic.openvino.library import explain
from penstock.classic.openvino.options import Options
from penstock.classic.openvino.values import from_tensor, to_tensor
from penstock.classic.tensors import Array
from penstock.engines.errors import EngineError, InvalidRequestError, PenstockError

logger = logging.getLogger(__name__)


class OpenVINOInstance(BackendInstance):
    def __init__(self, request: Any, config: ModelConfig, described: DescribedModel, options: Options) -> None:
        self._request = request
        self._name = config.name
        self._static_batch = config.max_batch_size if options.static_batch else 0
        self._pads = options.pads
        self._on_cpu = options.device == "CPU"
        self._inputs = {tensor.name: index for index, tensor in enumerate(described.inputs)}
        outputs = [*config.output, *state_outputs(config)]
        places = {tensor.name: index for index, tensor in enumerate(described.outputs)}
        self._outputs = {tensor.name: places[tensor.name] for tensor in outputs}
        self._states = {state.output_name for state in config.sequence_batching.state}
        self._scalars = Scalars(scalars_of(described.inputs), scalars_of(described.outputs), outputs)
        self._keeps_state = bool(request.query_state())

    def execute(self, batch: Batch) -> None:
        feed = batch.gather()
        rows = len(next(iter(feed.values()))) if self._static_batch else 0
        self._scalars.for_model(feed)
        wanted = wanted_outputs(batch.calls, tuple(self._outputs), self._states)
        try:
            self._infer(feed, rows)
            outputs = {name: self._output(self._outputs[name]) for name in wanted}
        except PenstockError:
            raise
        except Exception as error:
            raise self._explained(error) from error
        self._scalars.as_configured(outputs)
        batch.scatter({name: array[:rows] for name, array in outputs.items()} if rows else outputs)

    def _infer(self, feed: Mapping[str, Array], rows: int) -> None:
        if self._keeps_state:
            # what a request has left behind is nothing to the next one
            self._request.reset_state()
        # the request only points to their memory, which must last until it has been read
        tensors = {name: to_tensor(name, self._padded(array, rows) if rows else array) for name, array in feed.items()}
        for name, tensor in tensors.items():
            self._request.set_input_tensor(self._inputs[name], tensor)
        self._request.start_async()
        self._request.wait()

    def _padded(self, array: Array, rows: int) -> Array:
        """Filled up to the one batch size that the model has; what the added rows give is dropped."""
        missing = self._static_batch - rows
        if not missing:
            return array
        if not self._pads:
            raise InvalidRequestError(
                f"model '{self._name}' takes batches of {self._static_batch} only, and this one has {rows}: set"
                " ENABLE_BATCH_PADDING to YES"
            )
        return np.concatenate([array, np.repeat(array[-1:], missing, axis=0)])

    def _explained(self, error: Exception) -> PenstockError:
        text = f"model '{self._name}' failed: {explain(error)}"
        # an operator that fails on a CPU fails for the data it was given
        if self._on_cpu and isinstance(error, RuntimeError):
            return InvalidRequestError(text)
        logger.error("%s", text)
        return EngineError(text)

    def _output(self, index: int) -> Array:
        return from_tensor(self._request.get_output_tensor(index))

    def unload(self) -> None:
        # its memory is what the model computes in
        del self._request
