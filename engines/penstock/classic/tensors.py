"""Tensors as the KServe protocols know them, over numpy.

Datatype names are the protocol's (`FP32`, `BYTES`); configurations write `TYPE_FP32`, `TYPE_STRING`. BF16 is
`ml_dtypes.bfloat16`; BYTES is an object array of `bytes`. All arrays are little-endian and C-contiguous, whatever their
owner was.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from penstock.engines.errors import InvalidRequestError

Array = NDArray[Any]

MAX_ELEMENTS = 2**40
"""Of one tensor. Far above any body limit; products of dims are checked against it before anything is allocated."""

MAX_DIMS = 32
"""numpy's limit before version 2."""

_WORTH_A_VIEW = 16 << 10
"""Bytes. A copy of less costs less than a view of it."""

NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "BYTES": np.dtype(np.object_),
}
"""Datatype name to numpy dtype."""

_NAMES = {dtype: name for name, dtype in NUMPY_TYPES.items()}
_BY_COMMON_NAME = {dtype.name: name for name, dtype in NUMPY_TYPES.items()} | {"string": "BYTES"}


@dataclass(slots=True)
class Tensor:
    """A named tensor. `array.dtype` is always `NUMPY_TYPES[datatype]`."""

    name: str
    datatype: str
    array: Array


def datatype_of(dtype: np.dtype[Any]) -> str:
    """The datatype of arrays of this dtype (any byte order; text and bytes are BYTES). Raises ValueError."""
    if dtype.kind in "OSU":
        return "BYTES"
    name = _NAMES.get(dtype.newbyteorder("<"))
    if name is None:
        raise ValueError(f"there is no datatype for numpy's {dtype}")
    return name


def datatype_called(name: str) -> str:
    """`FP32` for `float32`, as numpy, PyTorch and TensorFlow call it; a name that no datatype has stays as it is."""
    return _BY_COMMON_NAME.get(name, name)


def config_type(datatype: str) -> str:
    """`TYPE_FP32` for `FP32`: the name in a model configuration."""
    return "TYPE_STRING" if datatype == "BYTES" else f"TYPE_{datatype}"


def from_config_type(name: str) -> str:
    """`FP32` for `TYPE_FP32`."""
    return "BYTES" if name == "TYPE_STRING" else name.removeprefix("TYPE_")


def element_count(shape: Iterable[int], name: str) -> int:
    """The product of the dims. Raises InvalidRequestError for a negative dim, too many of them, and for more than
    MAX_ELEMENTS (without the dims that are 0, too: numpy counts them so)."""
    dims = list(shape)
    if len(dims) > MAX_DIMS:
        raise InvalidRequestError(f"the shape of input '{name}' has more than {MAX_DIMS} dimensions")
    if min(dims, default=0) < 0:
        raise InvalidRequestError(f"input '{name}' has a negative dimension in its shape {dims}")
    count = math.prod(dims)
    if (count or math.prod(dim for dim in dims if dim)) > MAX_ELEMENTS:
        raise InvalidRequestError(f"the shape of input '{name}' has more elements than any request can carry")
    return count


def from_buffer(name: str, datatype: str, shape: Sequence[int], data: bytes | memoryview) -> Tensor:
    """A tensor over the protocol's binary form, without a copy (BYTES excepted). The array is read-only.

    Raises InvalidRequestError when the datatype is unknown or the size is not what the shape asks for.
    """
    count = element_count(shape, name)
    dtype = NUMPY_TYPES.get(datatype)
    if dtype is None:
        raise InvalidRequestError(f"input '{name}' has the unknown datatype '{datatype[:32]}'")
    if datatype == "BYTES":
        return Tensor(name, datatype, decode_bytes(data, count, name).reshape(shape))
    if len(data) != count * dtype.itemsize:
        raise InvalidRequestError(
            f"unexpected total byte size {len(data)} for input '{name}', expecting {count * dtype.itemsize}"
        )
    return Tensor(name, datatype, np.frombuffer(data, dtype).reshape(shape))


def to_buffer(tensor: Tensor) -> bytes:
    """The protocol's binary form: little-endian elements in C order; BYTES elements behind their lengths."""
    if tensor.datatype == "BYTES":
        return encode_bytes(tensor.array)
    return np.ascontiguousarray(tensor.array).tobytes()


def buffer_of(tensor: Tensor) -> bytes | memoryview:
    """As `to_buffer`, over the tensor's own memory where that is large: for a caller that copies it at once."""
    if tensor.datatype == "BYTES" or tensor.array.nbytes < _WORTH_A_VIEW:
        return to_buffer(tensor)
    return memoryview(np.ascontiguousarray(tensor.array).reshape(-1).view(np.uint8))


def decode_bytes(data: bytes | memoryview, count: int, name: str) -> Array:
    """`count` elements, each behind its length as a 4-byte little-endian integer, as a flat object array.

    Raises InvalidRequestError when the data has more or fewer, or a length that leads beyond the end.
    """
    if count * 4 > len(data):
        raise InvalidRequestError(
            f"unexpected number of string elements 0 for inference input '{name}', expecting {count}"
            if not len(data)
            else f"incomplete string length indicator for inference input '{name}', expecting {count} strings in "
            f"{len(data)} bytes"
        )
    array = np.empty(count, np.object_)
    view = memoryview(data)
    position, end = 0, len(data)
    unpack = struct.Struct("<I").unpack_from
    for index in range(count):
        if position + 4 > end:
            raise InvalidRequestError(
                f"unexpected number of string elements {index} for inference input '{name}', expecting {count}"
            )
        (length,) = unpack(view, position)
        position += 4
        if length > end - position:
            raise InvalidRequestError(
                f"incomplete string data for inference input '{name}', expecting string of length {length} but only "
                f"{end - position} bytes available"
            )
        array[index] = bytes(view[position : position + length])
        position += length
    if position != end:
        raise InvalidRequestError(
            f"unexpected number of string elements {count + 1} for inference input '{name}', expecting {count}"
        )
    return array


def encode_bytes(array: Array) -> bytes:
    """The binary form of an array of `bytes` (or `str`, as UTF-8)."""
    parts: list[bytes] = []
    for item in array.ravel():
        data = item if isinstance(item, bytes) else str(item).encode()
        parts += (len(data).to_bytes(4, "little"), data)
    return b"".join(parts)
