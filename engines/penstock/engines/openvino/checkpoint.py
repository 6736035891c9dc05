"""Safetensors checkpoints, memory-mapped: one file, or shards with an index.

The format: 8 bytes of little-endian header length, a JSON header (name -> dtype, shape, data_offsets), then the data.
Only safetensors are read: the other formats of the field are pickles, which run code when they are loaded.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator
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
    """One tensor of the checkpoint; `data` are its bytes, in row-major order, mapped from the file."""

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


class Checkpoint:
    """Tensors by name. The mapping lives as long as the arrays that look into it."""

    def __init__(self, model_dir: Path) -> None:
        self._tensors: dict[str, StoredTensor] = {}
        self._maps: list[mmap.mmap] = []
        for path in _weight_files(model_dir):
            mapping = _map(path)
            self._maps.append(mapping)
            self._tensors.update(_read(path.name, mapping))

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    @property
    def num_bytes(self) -> int:
        """Of all tensors together."""
        return sum(len(tensor.data) for tensor in self._tensors.values())

    def release_pages(self) -> None:
        """Gives the memory behind the mapping back to the system; what is read again comes from the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            for mapping in self._maps:
                mapping.madvise(mmap.MADV_DONTNEED)

    def __getitem__(self, name: str) -> StoredTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise EngineError(f"the checkpoint has no tensor {name}") from None


def _weight_files(model_dir: Path) -> list[Path]:
    single, index = model_dir / "model.safetensors", model_dir / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        pickles = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in model_dir.glob(pattern)]
        found = f"; {pickles[0]} is a pickle, which is never loaded" if pickles else ""
        raise UnsupportedError(f"no model.safetensors in {model_dir}: weights are read from safetensors only{found}")
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        outside = [name for name in names if Path(name).name != name]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise EngineError(f"{index.name} is damaged: {e!r}") from e
    if outside:
        raise EngineError(f"{index.name} names a file outside its folder: {outside[0]}")
    return [model_dir / name for name in names]


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as e:
        raise EngineError(f"{path.name} cannot be read: {e}") from e


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
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise EngineError(f"{name} cannot be read as safetensors: {e!r}") from e


def _tensor(name: str, entry: dict[str, Any], data: npt.NDArray[np.uint8]) -> StoredTensor:
    dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in _ITEM_BYTES:
        raise UnsupportedError(f"tensor {name} has dtype {dtype}; supported are {', '.join(_ITEM_BYTES)}")
    if not 0 <= start <= stop <= len(data) or stop - start != _ITEM_BYTES[dtype] * math.prod(shape):
        raise ValueError(f"tensor {name} does not fit its bytes")
    return StoredTensor(dtype, shape, data[start:stop])
