"""`model_warmup`: requests that a model answers before it is ready.

Each sample is sent `count` times (at least once) to every instance: as many requests run at once as there are of these.
To a model with `sequence_batching` each is a whole sequence.
"""

from __future__ import annotations

import asyncio
from dataclasses import fields
from pathlib import Path

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelWarmup

from penstock.classic.base import InferModel
from penstock.classic.messages import InferRequest
from penstock.classic.model_config import ModelConfig, datatype_name
from penstock.classic.statistics import ModelStatistics
from penstock.classic.tensors import NUMPY_TYPES, Array, Tensor, element_count, from_buffer
from penstock.engines.errors import InvalidRequestError, PenstockError

FOLDER = "warmup"
"""Where in the model's folder the files of `input_data_file` lie."""

MAX_BYTES = 2**30
"""Of one warm-up input."""


async def warm_up(model: InferModel, model_folder: Path) -> None:
    """Raises PenstockError: a sample that cannot be, or that the model fails. Leaves the statistics at zero."""
    samples = model.config.model_warmup
    if not samples:
        return
    instances = max(1, sum(group.count for group in model.config.instance_group))
    for sample in samples:
        try:
            inputs = await asyncio.to_thread(warmup_inputs, model.config, sample, model_folder)
            for _ in range(max(1, sample.count)):
                await _run(model, inputs, instances)
        except PenstockError as error:
            raise InvalidRequestError(f"warm-up sample '{sample.name}': {error.message}") from error
    _reset(model.statistics)


async def _run(model: InferModel, inputs: dict[str, Tensor], instances: int) -> None:
    """Sends the requests one after the other, each when the one before is being executed: they must not share a batch,
    nor fill a short queue. Waits for all of them, also when one fails."""
    requests: list[asyncio.Task[None]] = []
    try:
        for _ in range(instances):
            requests.append(asyncio.create_task(_infer(model, inputs)))
            await asyncio.sleep(0)
            while model.statistics.pending and not requests[-1].done():  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.001)
        ended = await asyncio.gather(*requests, return_exceptions=True)
    finally:
        for request in requests:
            request.cancel()
    for error in ended:
        if error is not None:
            raise error


async def _infer(model: InferModel, inputs: dict[str, Tensor]) -> None:
    request = InferRequest(inputs=dict(inputs))
    if model.config.HasField("sequence_batching"):
        request.correlation_id, request.sequence_start, request.sequence_end = 1, True, True
    stream = model.stream(request)
    try:
        async for response in stream:
            if response.error is not None:
                raise response.error
    finally:
        stream.close()


def warmup_inputs(config: ModelConfig, sample: ModelWarmup, model_folder: Path) -> dict[str, Tensor]:
    """The inputs of a sample that `check_supported` has let pass. Reads files. Raises InvalidRequestError."""
    found = {}
    for name, spec in sample.inputs.items():
        shape = list(spec.dims)
        batch = [max(1, sample.batch_size)] if config.max_batch_size > 0 else []
        _check_size(name, datatype_name(spec.data_type), [*batch, *shape])
        tensor = _tensor(name, spec, shape, model_folder)
        if batch:
            repeated = np.broadcast_to(tensor.array, (*batch, *shape))
            tensor = Tensor(name, tensor.datatype, np.ascontiguousarray(repeated))
        found[name] = tensor
    return found


def _tensor(name: str, spec: ModelWarmup.Input, shape: list[int], model_folder: Path) -> Tensor:
    datatype = datatype_name(spec.data_type)
    if spec.input_data_file:
        return _from_file(name, datatype, shape, spec.input_data_file, model_folder)
    random = spec.random_data and datatype != "BYTES"  # texts are empty, as in Triton: models parse theirs
    values = _random(datatype, shape) if random else _zeros(datatype, shape)
    return Tensor(name, datatype, values)


def _check_size(name: str, datatype: str, shape: list[int]) -> None:
    if element_count(shape, name) * NUMPY_TYPES[datatype].itemsize > MAX_BYTES:
        raise InvalidRequestError(f"input '{name}' has more than {MAX_BYTES} bytes")


def _zeros(datatype: str, shape: list[int]) -> Array:
    if datatype == "BYTES":
        return np.full(shape, b"", np.object_)
    return np.zeros(shape, NUMPY_TYPES[datatype])


def _random(datatype: str, shape: list[int]) -> Array:
    """Floats in [0, 1), integers over their whole range. The same at every start."""
    random = np.random.default_rng(0)
    dtype = NUMPY_TYPES[datatype]
    if datatype == "BOOL":
        return random.integers(0, 2, shape).astype(np.bool_)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return random.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    return random.random(shape).astype(dtype)


def _from_file(name: str, datatype: str, shape: list[int], filename: str, model_folder: Path) -> Tensor:
    """Raw values, little-endian and in C order; texts behind their lengths, as in a binary request. What a file of
    numbers has beyond the shape is not read, as in Triton."""
    folder = (model_folder / FOLDER).resolve()
    path = (folder / filename).resolve()
    if not filename or not path.is_relative_to(folder) or not path.is_file():
        raise InvalidRequestError(f"input '{name}': there is no file '{filename}' in the model's {FOLDER} folder")
    size = MAX_BYTES if datatype == "BYTES" else element_count(shape, name) * NUMPY_TYPES[datatype].itemsize
    if datatype == "BYTES" and path.stat().st_size > size:
        raise InvalidRequestError(f"input '{name}': the file '{filename}' has more than {size} bytes")
    with path.open("rb") as file:
        return from_buffer(name, datatype, shape, file.read(size))


def _reset(statistics: ModelStatistics) -> None:
    """Warm-ups are nobody's requests."""
    fresh = ModelStatistics()
    for item in fields(ModelStatistics):
        if item.name != "pending":
            setattr(statistics, item.name, getattr(fresh, item.name))
