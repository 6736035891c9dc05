"""`model_warmup`: requests that a model answers before it is ready.

Each sample is sent `count` times (at least once) to every instance: as many requests run at once as there are of these.
To a model with `sequence_batching` it is `batch_size` whole sequences of one request. A sample with `batch_size` 0 is
left out, as in Triton.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import count
from pathlib import Path

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelWarmup

from penstock.classic.base import InferModel
from penstock.classic.messages import InferRequest, WarmUpRequest
from penstock.classic.model_config import ModelConfig, datatype_name
from penstock.classic.model_files import stays_inside
from penstock.classic.statistics import ModelStatistics
from penstock.classic.tensors import NUMPY_TYPES, Array, Tensor, element_count, from_buffer
from penstock.engines.errors import InvalidRequestError, PenstockError

logger = logging.getLogger(__name__)

FOLDER = "warmup"
"""Where in the model's folder the files of `input_data_file` lie."""

MAX_BYTES = 2**30
"""Of one warm-up input."""
MAX_SEQUENCES = 4096
"""Of one sample: far above use, and keeps a slip of the pen from taking all memory."""


async def warm_up(model: InferModel, model_folder: Path) -> None:
    """Raises PenstockError: a sample that cannot be, or that the model fails. Leaves the statistics at zero."""
    samples = [sample for sample in model.config.model_warmup if sample.batch_size]
    if not samples:
        return
    instances = max(1, sum(group.count for group in model.config.instance_group))
    ids = count(1)
    for sample in samples:
        try:
            inputs = await asyncio.to_thread(warmup_inputs, model.config, sample, model_folder)
            requests = _requests(model.config, sample, inputs, ids)
            for iteration in range(1, max(1, sample.count) + 1):
                logger.debug("%s is running warmup sample %r for iteration %d", model.name, sample.name, iteration)
                await _run(model, requests, instances)
        except PenstockError as error:
            raise InvalidRequestError(f"failed to run warmup sample '{sample.name}': {error.message}") from error
    _reset(model.statistics)


def _requests(
    config: ModelConfig, sample: ModelWarmup, inputs: dict[str, Tensor], ids: Iterator[int]
) -> Callable[[], list[InferRequest]]:
    """Makes the requests of a sample, new ones each time: one, or a sequence for each inference, with the next id.

    Raises InvalidRequestError for more than MAX_SEQUENCES.
    """
    if not config.HasField("sequence_batching"):
        return lambda: [InferRequest(inputs=dict(inputs))]
    if sample.batch_size > MAX_SEQUENCES:
        raise InvalidRequestError(f"batch_size {sample.batch_size} is more than {MAX_SEQUENCES} sequences")
    own = {tensor.name for tensor in config.input}
    sent = {name: tensor for name, tensor in inputs.items() if name in own}
    overrides = {name: tensor for name, tensor in inputs.items() if name not in own}
    return lambda: [
        WarmUpRequest(
            inputs=dict(sent), correlation_id=next(ids), sequence_start=True, sequence_end=True, overrides=overrides
        )
        for _ in range(sample.batch_size)
    ]


async def _run(model: InferModel, requests: Callable[[], list[InferRequest]], instances: int) -> None:
    """Sends a sample once for each instance, each when the one before is being executed: they must not share a batch,
    nor fill a short queue. Waits for all of them, also when one fails."""
    running: list[asyncio.Task[None]] = []
    try:
        for _ in range(instances):
            running += [asyncio.create_task(_infer(model, request)) for request in requests()]
            await asyncio.sleep(0)
            while model.statistics.pending and not running[-1].done():  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.001)
        ended = await asyncio.gather(*running, return_exceptions=True)
    finally:
        for request in running:
            request.cancel()
    for error in ended:
        if error is not None:
            raise error


async def _infer(model: InferModel, request: InferRequest) -> None:
    stream = model.stream(request)
    try:
        async for response in stream:
            if response.error is not None:
                raise response.error
    finally:
        stream.close()


def warmup_inputs(config: ModelConfig, sample: ModelWarmup, model_folder: Path) -> dict[str, Tensor]:
    """The inputs of a sample that `check_supported` has let pass. Reads files. Raises InvalidRequestError."""
    tensors = {}
    sequences = config.HasField("sequence_batching")
    for name, spec in sample.inputs.items():
        shape = list(spec.dims)
        batch = [1 if sequences else sample.batch_size] if config.max_batch_size > 0 else []
        _check_size(name, datatype_name(spec.data_type), [*batch, *shape])
        tensor = _tensor(name, spec, shape, model_folder)
        if batch:
            repeated = np.broadcast_to(tensor.array, (*batch, *shape))
            tensor = Tensor(name, tensor.datatype, np.ascontiguousarray(repeated))
        tensors[name] = tensor
    return tensors


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
    path = model_folder / FOLDER / filename
    if not stays_inside(filename) or not path.is_file():
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
