"""Input tensors of KServe requests: which ones, of what shape, with what in them."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.loadtest.clients.base import ClientOptions
from penstock.loadtest.clients.kserve_model import ModelMetadata, TensorMetadata
from penstock.loadtest.errors import LoadTestError

SIZES = {"BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8, "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8}
SIZES |= {"FP16": 2, "BF16": 2, "FP32": 4, "FP64": 8}
"""Bytes of an element; BYTES has no size of its own."""
_TYPES = {"FP16": np.float16, "FP32": np.float32, "FP64": np.float64}
_BELOW = 100
"""Integers are from 0 up to here: small enough to be an index or a token of most models."""
_STRING_LENGTH = 16


class Tensor(NamedTuple):
    name: str
    datatype: str
    shape: tuple[int, ...]
    values: npt.NDArray[Any]
    """Flat; BF16 as float32, BYTES as bytes objects."""

    def raw(self) -> bytes:
        """As the binary extension and gRPC send it: little-endian, row by row."""
        if self.datatype == "BYTES":
            return b"".join([len(item).to_bytes(4, "little") + item for item in self.values])
        if self.datatype == "BF16":  # the upper half of a float32
            return (self.values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        return self.values.astype(self.values.dtype.newbyteorder("<")).tobytes()

    def json(self) -> list[Any]:
        """Flat."""
        values = self.values.tolist()
        if self.datatype == "BYTES":
            return [item.decode() for item in values]
        return [round(value, 4) for value in values] if self.datatype in _TYPES else values


def described(texts: Sequence[str], batch_size: int) -> list[TensorMetadata]:
    """From `NAME:DATATYPE:1,3,224`. Raises LoadTestError."""
    tensors = [_described(text, batch_size) for text in texts]
    names = [tensor.name for tensor in tensors]
    if len(set(names)) < len(names):
        raise LoadTestError(f"input-tensor: {max(names, key=names.count)} is given twice")
    return tensors


def _described(text: str, batch_size: int) -> TensorMetadata:
    name, _, rest = text.partition(":")
    datatype, _, dims = rest.partition(":")
    try:
        shape = [int(dim) for dim in dims.split(",")] if dims else []
    except ValueError:
        shape = [-1]
    if not name or not rest or any(dim < 1 for dim in shape):
        raise LoadTestError(f"input-tensor: {text!r} is not NAME:DATATYPE:1,3,224")
    if batch_size > 1:
        if shape[:1] != [1]:
            raise LoadTestError(f"batch-size: the shape of --input-tensor {name} must begin with 1")
        shape[0] = batch_size
    return TensorMetadata(name, datatype, shape)


def of_metadata(metadata: ModelMetadata, batch_size: int) -> list[TensorMetadata]:
    """The model's inputs with `batch_size` in the place of a first dimension that may vary. Raises LoadTestError for
    others that may."""
    if not metadata.inputs:
        raise LoadTestError("the model's metadata name no input: give them with --input-tensor")
    for tensor in metadata.inputs:
        shape = tensor.shape
        if any(dim < 0 for dim in shape[1:]):
            known = ",".join(map(str, shape))
            raise LoadTestError(
                f"the model leaves dimensions of its input {tensor.name} open ({known}): specify it with "
                f"--input-tensor {tensor.name}:{tensor.datatype}:1,..."
            )
        if batch_size > 1 and shape[:1] != [-1]:
            raise LoadTestError(f"batch-size: input {tensor.name} has the shape {shape}, which leaves batches no room")
    return [
        TensorMetadata(tensor.name, tensor.datatype, [batch_size if dim < 0 else dim for dim in tensor.shape])
        for tensor in metadata.inputs
    ]


def random_tensors(options: ClientOptions, metadata: ModelMetadata | None) -> list[Tensor]:
    """What every request has. `metadata` are needed where the options name no tensors. Raises LoadTestError."""
    if options.input_tensor:
        shapes = described(options.input_tensor, options.batch_size)
    else:
        shapes = of_metadata(metadata or ModelMetadata(), options.batch_size)
    rng = np.random.default_rng(options.seed & (1 << 64) - 1)
    return [Tensor(shape.name, shape.datatype, tuple(shape.shape), _values(shape, rng)) for shape in shapes]


def _values(tensor: TensorMetadata, rng: np.random.Generator) -> npt.NDArray[Any]:
    datatype, count = tensor.datatype, math.prod(tensor.shape)
    if datatype == "BYTES":
        letters = np.array(list(string.ascii_lowercase.encode()), np.uint8)
        texts = rng.choice(letters, (count, _STRING_LENGTH))
        values = np.empty(count, np.object_)
        values[:] = [text.tobytes() for text in texts]
        return values
    if datatype not in SIZES:
        raise LoadTestError(f"input {tensor.name}: {datatype} is none of BYTES, {', '.join(SIZES)}")
    if datatype == "BOOL":
        return rng.integers(0, 2, count).astype(np.bool_)
    if datatype.startswith(("INT", "UINT")):
        return rng.integers(0, _BELOW, count).astype(datatype.lower())
    values = np.round(rng.random(count), 4).astype(_TYPES.get(datatype, np.float32))
    if datatype == "BF16":
        values = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    return values
