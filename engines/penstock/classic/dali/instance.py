"""One instance: a pipeline, which is built again after it has failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from penstock.classic.base import BackendInstance, Batch, InferCall
from penstock.classic.dali.configuring import is_encoded
from penstock.classic.dali.library import explain
from penstock.classic.messages import InferResponse
from penstock.classic.model_config import ModelConfig, datatype_name
from penstock.classic.tensors import NUMPY_TYPES, Array, Tensor
from penstock.engines.errors import EngineError, InvalidRequestError, PenstockError

Samples = Array | list[Array]
"""Of an output: an array if all have the same shape."""


class DaliInstance(BackendInstance):
    def __init__(self, build: Callable[[], Any], config: ModelConfig, split: frozenset[str]) -> None:
        """`split`: outputs whose samples are answered as one, along their first dimension."""
        self._build = build
        self._pipeline: Any = build()
        self._name = config.name
        self._batched = config.max_batch_size > 0
        self._encoded = {tensor.name for tensor in config.input if is_encoded(tensor)}
        self._ragged = [tensor.name for tensor in config.input if tensor.allow_ragged_batch]
        """What `gather` gives of them has no shapes any more."""
        self._outputs = {tensor.name: datatype_name(tensor.data_type) for tensor in config.output}
        self._split = split

    def execute(self, batch: Batch) -> None:
        feed = {name: self._samples(name, array) for name, array in batch.gather().items()}
        for name in self._ragged:
            arrays = [call.request.inputs[name].array for call in batch.calls]
            feed[name] = [row for array in arrays for row in array] if self._batched else arrays
        outputs = self._run(feed)
        if self._split or any(isinstance(samples, list) for samples in outputs.values()):
            self._answer_one_by_one(batch.calls, outputs)
        else:
            batch.scatter({name: np.asarray(found) if self._batched else found[0] for name, found in outputs.items()})

    def _samples(self, name: str, array: Array) -> Samples:
        if name in self._encoded:
            return [np.frombuffer(item, np.uint8) for item in array.ravel().tolist()]
        return array if self._batched else array[np.newaxis]

    def _run(self, feed: Mapping[str, Samples]) -> dict[str, Samples]:
        if self._pipeline is None:
            self._pipeline = self._rebuilt()
        try:
            for name, samples in feed.items():
                self._pipeline.feed_input(name, samples)
            found = self._pipeline.run()
            return {name: self._output(name, tensors) for name, tensors in zip(self._outputs, found, strict=True)}
        except PenstockError:
            raise
        except Exception as error:
            # an operator that fails fails for the data it was given, and the pipeline is of no use any more
            self._pipeline = None
            raise InvalidRequestError(f"model '{self._name}' failed: {explain(error)}") from error

    def _rebuilt(self) -> Any:
        try:
            return self._build()
        except ValueError as error:
            raise EngineError(str(error)) from error

    def _output(self, name: str, tensors: Any) -> Samples:
        """Copies: the next run writes to the same memory."""
        tensors = tensors.as_cpu()
        if tensors.is_dense_tensor():
            found: Samples = np.array(tensors.as_array())
        else:
            found = [np.array(tensors.at(place)) for place in range(len(tensors))]
        wanted, dtype = self._outputs[name], found[0].dtype
        if dtype != NUMPY_TYPES[wanted]:
            raise EngineError(f"output '{name}' of model '{self._name}' is {dtype}, the configuration says {wanted}")
        return found

    def _answer_one_by_one(self, calls: Sequence[InferCall], outputs: Mapping[str, Samples]) -> None:
        """Each with its own samples, whose shapes are not those of the neighbours."""
        start = 0
        for call in calls:
            stop = start + self._size(call)
            try:
                tensors = [self._part(name, samples[start:stop]) for name, samples in outputs.items()]
                call.send(InferResponse(tensors))
            except InvalidRequestError as error:
                call.fail(error)
            start = stop

    def _size(self, call: InferCall) -> int:
        return len(next(iter(call.request.inputs.values())).array) if self._batched else 1

    def _part(self, name: str, samples: Samples) -> Tensor:
        split = name in self._split
        shapes = {sample.shape[1:] if split else sample.shape for sample in samples}
        if len(shapes) > 1:
            told = " and ".join(str(list(shape)) for shape in sorted(shapes)[:2])
            raise InvalidRequestError(
                f"output '{name}' of model '{self._name}' has samples of different shapes ({told}): send them in"
                " requests of their own"
            )
        if split:
            array = np.concatenate(list(samples))
        else:
            array = np.stack(list(samples)) if self._batched else samples[0]
        return Tensor(name, self._outputs[name], np.ascontiguousarray(array))

    def unload(self) -> None:
        # its buffers are most of its memory
        self._pipeline = None
