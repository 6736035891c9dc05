"""The GGUF container (ggml's docs/gguf.md): metadata and tensors, memory-mapped.

The `gguf` package has a reader, too. It makes numpy arrays of each string: 8 s and 500 MB for a vocabulary of 150,000
tokens, where this one takes 0.2 s. The block formats of the tensors are that package's.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.formats.safetensors_file import Shape

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
"""`struct` codes of the types of metadata values."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_MOST_AXES = 4

_BLOCKS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}
"""Name, elements and bytes of a block, by ggml's number of the type. Others are refused by number."""


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    """A tensor as the file holds it."""

    dtype: str
    """ggml's name of the block format: F32, Q4_K ..."""
    shape: Shape
    """Rows first, as numpy has it."""
    rows: npt.NDArray[np.uint8]
    """[rows, bytes of a row], mapped from the file."""


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The parts of one file. The arrays look into `mapping`."""

    metadata: dict[str, Any]
    tensors: dict[str, StoredBlocks]
    mapping: mmap.mmap


def read_gguf(path: Path) -> GGUFFile:
    """Raises EngineError for what is no such file, UnsupportedError for a version or a tensor type that is unknown."""
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise EngineError(f"{path.name} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    try:
        return _Reader(mapping).read()
    except (ValueError, struct.error, OverflowError, MemoryError) as error:
        raise EngineError(f"{path.name} cannot be read as GGUF: {error}") from error


class _Reader:
    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self._at = 0

    def read(self) -> GGUFFile:
        if self._mapping[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._number("I")
        if version not in _VERSIONS:
            raise UnsupportedError(f"GGUF of version {version} is not supported; {_VERSIONS[0]} and {_VERSIONS[1]} are")
        num_tensors, num_entries = self._number("Q"), self._number("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._text()
            metadata[key] = self._value(self._number("I"))
        described = [self._described() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0:
            raise ValueError(f"general.alignment is {alignment}")
        data = np.frombuffer(self._mapping, np.uint8)[-(-self._at // alignment) * alignment :]
        tensors = {name: _blocks(name, shape, kind, at, data) for name, shape, kind, at in described}
        return GGUFFile(metadata, tensors, self._mapping)

    def _number(self, code: str) -> Any:
        kind = struct.Struct("<" + code)
        (value,) = kind.unpack_from(self._mapping, self._at)
        self._at += kind.size
        return value

    def _text(self) -> str:
        size = self._number("Q")
        begin, self._at = self._at, self._at + size
        if self._at > len(self._mapping):
            raise ValueError("a text goes beyond the end of the file")
        return self._mapping[begin : self._at].decode("utf-8", "replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array()
        if kind == _BOOL:
            return bool(self._number("B"))
        if kind not in _NUMBERS:
            raise ValueError(f"a value of the unknown type {kind}")
        return self._number(_NUMBERS[kind])

    def _array(self) -> list[Any]:
        kind, count = self._number("I"), self._number("Q")
        if kind == _STRING:
            return [self._text() for _ in range(count)]
        code = "?" if kind == _BOOL else _NUMBERS.get(kind)
        if code is None:
            raise ValueError(f"an array of the type {kind}")
        values = np.frombuffer(self._mapping, np.dtype(code).newbyteorder("<"), count, self._at)
        self._at += values.nbytes
        return list(values.tolist())

    def _described(self) -> tuple[str, Shape, int, int]:
        """Name, shape, number of the type, and place in the data."""
        name, num_axes = self._text(), self._number("I")
        if num_axes > _MOST_AXES:
            raise ValueError(f"tensor {name} has {num_axes} axes")
        lengths = [self._number("Q") for _ in range(num_axes)]
        return name, tuple(reversed(lengths)), self._number("I"), self._number("Q")


def _blocks(name: str, shape: Shape, kind: int, begin: int, data: npt.NDArray[np.uint8]) -> StoredBlocks:
    if kind not in _BLOCKS:
        known = ", ".join(name_of_type for name_of_type, _, _ in _BLOCKS.values())
        raise UnsupportedError(f"tensor {name} has ggml's type {kind}, which is not supported; supported are {known}")
    dtype, elements, size = _BLOCKS[kind]
    width = shape[-1] if shape else 1
    row_bytes = width // elements * size
    rows = math.prod(shape[:-1])
    if width % elements or begin + rows * row_bytes > len(data):
        raise ValueError(f"tensor {name} does not fit its bytes")
    return StoredBlocks(dtype, shape, data[begin : begin + rows * row_bytes].reshape(rows, row_bytes))


class FileSettings:
    """The metadata are those whose names begin with the file's own architecture."""

    def __init__(
        self, metadata: Mapping[str, Any], tensors: Mapping[str, StoredBlocks], differing: Container[str] = ()
    ) -> None:
        """`differing`: settings that may differ between layers. Their count is the first layer's."""
        self._metadata = metadata
        self._differing = differing
        self._prefix = f"{metadata['general.architecture']}."
        self.tensors = tensors

    def get(self, name: str) -> Any:
        return self._metadata.get(self._prefix + name)

    def count(self, name: str, default: int | None = None, *, some_zero: bool = False) -> int:
        """`some_zero`: a list may have a 0 for layers without what is counted."""
        value = self.get(name)
        if some_zero and isinstance(value, list):
            value = [number for number in value if number != 0]
        if value is None and default is not None:
            return default
        if isinstance(value, list) and value and (name in self._differing or len(set(map(str, value))) == 1):
            value = value[0]  # one for each layer
        if isinstance(value, list):
            raise UnsupportedError(f"the GGUF file has a {self._prefix}{name} that differs between layers")
        if type(value) is not int or value <= 0:
            raise EngineError(f"the GGUF file has {self._prefix}{name}={str(value)[:50]}, which should be a count")
        return value

    def count_or_zero(self, name: str) -> int:
        """0 where the file does not say it."""
        return self.count(name) if self.get(name) else 0

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise EngineError(f"the GGUF file has {self._prefix}{name}={str(value)[:50]}, which should be a number")
        return float(value)

    def by_layer(self, name: str, layers: int) -> list[Any]:
        """The file has one for each layer, or one for all; what is behind the layers is left out."""
        value = self.get(name)
        if not isinstance(value, list):
            return [value] * layers
        if len(value) < layers:
            raise EngineError(f"the GGUF file has {self._prefix}{name} for {len(value)} layers, and {layers} layers")
        return value[:layers]

    def has(self, *names: str) -> bool:
        """Whether one of these tensors is in the first layer."""
        return any(f"blk.0.{name}" in self.tensors for name in names)

    def some_layer_has(self, name: str) -> bool:
        return any(full.endswith(f".{name}") for full in self.tensors)

    def rows_of(self, name: str) -> int:
        """Rows of a matrix of the first layer that has it, or of each of its experts'."""
        shapes = (tensor.shape for full, tensor in self.tensors.items() if full.endswith(f".{name}.weight"))
        shape = next(shapes, ())
        if len(shape) < 2:
            raise EngineError(f"the GGUF file has no matrix {name}")
        return shape[-2]
