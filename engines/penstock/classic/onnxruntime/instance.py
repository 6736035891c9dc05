"""One instance: a session that runs one batch at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.classic.base import BackendInstance, Batch
from penstock.classic.batching.sequences.controls import state_outputs
from penstock.classic.described import DescribedModel, Scalars, scalars_of, to_bytes, to_text, wanted_outputs
from penstock.classic.model_config import ModelConfig
from penstock.classic.onnxruntime import values
from penstock.classic.onnxruntime.library import FAIL, INVALID_ARGUMENT, explain
from penstock.classic.onnxruntime.options import run_options
from penstock.classic.tensors import Array
from penstock.engines.errors import EngineError, InvalidRequestError

logger = logging.getLogger(__name__)

_Run = Callable[[Sequence[str], Mapping[str, Array]], Sequence[Array]]


class OnnxRuntimeInstance(BackendInstance):
    """`session.run` over numpy arrays: 4 us for an add of 16 floats, where binding inputs and outputs takes 8."""

    def __init__(self, session: Any, config: ModelConfig, described: DescribedModel, *, on_cpu: bool) -> None:
        self._session = session
        self._run_options = run_options(config)
        outputs = [*config.output, *state_outputs(config)]
        self._outputs = [tensor.name for tensor in outputs]
        self._states = {state.output_name for state in config.sequence_batching.state}
        inputs = (*described.inputs, *described.optional_inputs)
        self._text_inputs = [tensor.name for tensor in inputs if tensor.datatype == "BYTES"]
        self._text_outputs = {tensor.name for tensor in described.outputs if tensor.datatype == "BYTES"}
        self._scalars = Scalars(scalars_of(inputs), scalars_of(described.outputs), outputs)
        bfloat16 = any(tensor.datatype == "BF16" for tensor in (*inputs, *described.outputs))
        self._run: _Run = self._run_values if bfloat16 else self._run_arrays
        # an operator that fails on a CPU fails for the data it was given; on a GPU, that may be its memory
        self._callers_fault = {INVALID_ARGUMENT, FAIL} if on_cpu else {INVALID_ARGUMENT}

    def execute(self, batch: Batch) -> None:
        feed = batch.gather()
        for name in self._text_inputs:
            if name in feed:
                feed[name] = to_text(name, feed[name])
        self._scalars.for_model(feed)
        names = wanted_outputs(batch.calls, self._outputs, self._states)
        try:
            found = self._run(names, feed)
        except Exception as error:
            raise self._explained(error) from error
        outputs = dict(zip(names, found, strict=True))
        for name in self._text_outputs & outputs.keys():
            outputs[name] = to_bytes(outputs[name])
        self._scalars.as_configured(outputs)
        batch.scatter(outputs)

    def _run_arrays(self, names: Sequence[str], feed: Mapping[str, Array]) -> Sequence[Array]:
        found: Sequence[Array] = self._session.run(names, feed, self._run_options)
        return found

    def _run_values(self, names: Sequence[str], feed: Mapping[str, Array]) -> Sequence[Array]:
        binding = self._session.io_binding()
        for name, array in feed.items():
            binding.bind_ortvalue_input(name, values.to_value(array))
        for name in names:
            binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(binding, self._run_options)
        return [values.from_value(value) for value in binding.get_outputs()]

    def _explained(self, error: Exception) -> Exception:
        code, text = explain(error)
        if code in self._callers_fault:
            return InvalidRequestError(text)
        logger.error("%s", text)
        return EngineError(text)

    def unload(self) -> None:
        # its memory is the model's weights
        del self._session
