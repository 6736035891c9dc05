"""Triton's `dali` backend: serialized pipelines. docs/builtin_backends.md lists what it supports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.classic.base import (
    Backend,
    BackendInstance,
    BackendModel,
    Batch,
    InferCall,
    InstanceContext,
    ModelContext,
)
from penstock.classic.dali.definition import (
    check,
    complete,
    explain,
    is_encoded,
    load_dali,
    read_definition,
    serialized_pipeline,
    split_outputs,
)
from penstock.classic.frameworks import is_complete
from penstock.classic.messages import InferResponse
from penstock.classic.model_config import ModelConfig, datatype_name
from penstock.classic.parameters import check_options, flag, strings, thread_count, threads_per_instance
from penstock.classic.tensors import NUMPY_TYPES, Array, Tensor
from penstock.engines.errors import EngineError, InvalidRequestError, PenstockError

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
            batch.scatter({name: np.asarray(parts) if self._batched else parts[0] for name, parts in outputs.items()})

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
            results = self._pipeline.run()
            return {name: self._output(name, tensors) for name, tensors in zip(self._outputs, results, strict=True)}
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
            samples: Samples = np.array(tensors.as_array())
        else:
            samples = [np.array(tensors.at(place)) for place in range(len(tensors))]
        datatype, dtype = self._outputs[name], samples[0].dtype
        if dtype != NUMPY_TYPES[datatype]:
            raise EngineError(f"output '{name}' of model '{self._name}' is {dtype}, the configuration says {datatype}")
        return samples

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
            names = " and ".join(str(list(shape)) for shape in sorted(shapes)[:2])
            raise InvalidRequestError(
                f"output '{name}' of model '{self._name}' has samples of different shapes ({names}): send them in"
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
