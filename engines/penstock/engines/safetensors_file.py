"""Files of the safetensors format, memory-mapped.

The format: 8 bytes of little-endian header length, a JSON header (name -> dtype, shape, data_offsets), then the data.
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.engines.errors import EngineError, UnsupportedError

_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_HEADER_LIMIT = 100_000_000
"""The format's own bound on the header, in bytes."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor; `data` are its bytes, in row-major order, mapped from the file."""

    dtype: str
    """F32, F16 or BF16."""
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]

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
        return self.rows_f32(0, self.shape[0])


def read_safetensors(path: Path) -> tuple[dict[str, StoredTensor], mmap.mmap]:
    """Tensors by name, and the mapping that they look into, which lives as long as they do.

    Raises EngineError for what is no such file, UnsupportedError for a tensor of another type than those of
    `StoredTensor.dtype`. Neither says where the file lies.
    """
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as e:
        raise EngineError(f"{path.name} cannot be read: {e.strerror}") from e
    except ValueError as e:
        raise EngineError(f"{path.name} cannot be read: {e}") from e
    return _read(path.name, mapping), mapping


def _read(name: str, mapping: mmap.mmap) -> dict[str, StoredTensor]:
    try:
        buffer = np.frombuffer(mapping, np.uint8)
        length = int.from_bytes(buffer[:8].tobytes(), "little")
        if length > min(_HEADER_LIMIT, len(buffer) - 8):
            raise ValueError(f"a header of {length} bytes")
        header: dict[str, Any] = json.loads(buffer[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        data = buffer[8 + length :]
        return {key: _tensor(key, entry, data) for key, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise EngineError(f"{name} cannot be read as safetensors: {e!r}") from e


def _tensor(name: str, entry: dict[str, Any], data: npt.NDArray[np.uint8]) -> StoredTensor:
    dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in _ITEM_BYTES:
        raise UnsupportedError(f"tensor {name} has dtype {dtype}; supported are {', '.join(_ITEM_BYTES)}")
    sizes = all(isinstance(size, int) and size >= 0 for size in shape)
    if not sizes or not 0 <= start <= stop <= len(data) or stop - start != _ITEM_BYTES[dtype] * math.prod(shape):
        raise ValueError(f"tensor {name} does not fit its bytes")
    return StoredTensor(dtype, shape, data[start:stop])
