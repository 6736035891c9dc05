"""Files of the safetensors format, memory-mapped.

The format: 8 bytes of little-endian header length, a JSON header (name -> dtype, shape, data_offsets), then the data.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.engines.errors import EngineError, UnsupportedError

Shape = tuple[int, ...]
_Made = TypeVar("_Made")

_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
FLOATS = tuple(_ITEM_BYTES)
"""Types of more than 8 bits."""
_INTEGERS = {"I8": np.int8, "U8": np.uint8, "I32": np.int32, "I64": np.int64, "F8_E4M3": np.uint8}
"""What tensors of quantized checkpoints are read as."""
_HEADER_LIMIT = 100_000_000
"""The format's own bound on the header, in bytes."""
_MISFIT = "tensor {} does not fit its bytes"


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What the header says of one tensor."""

    dtype: str
    """As the format names it, "F8_E4M3" for one."""
    shape: Shape
    num_bytes: int


@dataclass(frozen=True)
class StoredTensor:
    """One tensor; `data` are its bytes, in row-major order, mapped from the file."""

    dtype: str
    """F32, F16 or BF16; in quantized checkpoints I8, U8, I32, I64 and F8_E4M3, too."""
    shape: Shape
    data: npt.NDArray[np.uint8]

    @property
    def is_float(self) -> bool:
        """Of more than 8 bits: what `rows_f32` is for."""
        return self.dtype in _ITEM_BYTES

    def rows_f32(self, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows [start, stop) of the first axis as float32."""
        row_bytes = _ITEM_BYTES[self.dtype] * math.prod(self.shape[1:])
        part = self.data[start * row_bytes : stop * row_bytes]
        shape = (stop - start, *self.shape[1:])
        if self.dtype == "BF16":
            return (part.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
        source = part.view(np.float32 if self.dtype == "F32" else np.float16)
        return source.astype(np.float32).reshape(shape)

    def f32(self) -> npt.NDArray[np.float32]:
        rows = self if self.shape else StoredTensor(self.dtype, (1,), self.data)
        return rows.rows_f32(0, rows.shape[0]).reshape(self.shape)

    def integers(self) -> npt.NDArray[Any]:
        """Those of a type that is no float; of F8_E4M3 the bytes."""
        return self.data.view(_INTEGERS[self.dtype]).reshape(self.shape)


def read_safetensors(
    path: Path, takes: Callable[[str], bool] = lambda name: True, *, quantized: bool = False
) -> tuple[dict[str, StoredTensor], mmap.mmap]:
    """Tensors by name, and the mapping that they look into, which lives as long as they do. Only those that are
    `takes`: the others may be of any type. `quantized`: with the types of quantized checkpoints.

    Raises EngineError for what is no such file, UnsupportedError for a tensor of another type than those of
    `StoredTensor.dtype`. Neither says where the file lies.
    """
    mapping = _map(path)
    item_bytes = _ITEM_BYTES | (
        {name: np.dtype(kind).itemsize for name, kind in _INTEGERS.items()} if quantized else {}
    )
    return _read(path.name, mapping, partial(_tensor, item_bytes), takes), mapping


def read_header(path: Path) -> dict[str, TensorHeader]:
    """By name, of tensors of any type; of the data nothing is read. Raises EngineError as `read_safetensors`."""
    return _read(path.name, _map(path), lambda name, entry, data: _described(name, entry, data)[0])


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as e:
        raise EngineError(f"{path.name} cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise EngineError(f"{path.name} cannot be read: {e}") from e


def _read(
    name: str,
    mapping: mmap.mmap,
    made_of: Callable[[str, dict[str, Any], npt.NDArray[np.uint8]], _Made],
    takes: Callable[[str], bool] = lambda name: True,
) -> dict[str, _Made]:
    """`made_of`: (tensor's name, its entry in the header, the file's data)."""
    try:
        buffer = np.frombuffer(mapping, np.uint8)
        length = int.from_bytes(buffer[:8].tobytes(), "little")
        if length > min(_HEADER_LIMIT, len(buffer) - 8):
            raise ValueError(f"a header of {length} bytes")
        header: dict[str, Any] = json.loads(buffer[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        data = buffer[8 + length :]
        return {key: made_of(key, entry, data) for key, entry in header.items() if takes(key)}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise EngineError(f"{name} cannot be read as safetensors: {e!r}") from e


def _tensor(
    item_bytes: Mapping[str, int], name: str, entry: dict[str, Any], data: npt.NDArray[np.uint8]
) -> StoredTensor:
    described, stored = _described(name, entry, data)
    if described.dtype not in item_bytes:
        raise UnsupportedError(f"tensor {name} has dtype {described.dtype}; supported are {', '.join(item_bytes)}")
    if described.num_bytes != item_bytes[described.dtype] * math.prod(described.shape):
        raise ValueError(_MISFIT.format(name))
    return StoredTensor(described.dtype, described.shape, stored)


def _described(
    name: str, entry: dict[str, Any], data: npt.NDArray[np.uint8]
) -> tuple[TensorHeader, npt.NDArray[np.uint8]]:
    dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    sizes = all(isinstance(size, int) and size >= 0 for size in shape)
    if not isinstance(dtype, str) or not sizes or not 0 <= start <= stop <= len(data):
        raise ValueError(_MISFIT.format(name))
    return TensorHeader(dtype, shape, stop - start), data[start:stop]
