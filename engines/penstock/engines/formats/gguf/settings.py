"""What a GGUF file says of its model: the metadata of its architecture, and which tensors it has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.formats.gguf.container import StoredBlocks


class FileSettings:
    """The metadata are those whose names begin with the file's own architecture."""

    def __init__(self, metadata: Mapping[str, Any], tensors: Mapping[str, StoredBlocks]) -> None:
        self._metadata = metadata
        self._prefix = f"{metadata['general.architecture']}."
        self.tensors = tensors

    def get(self, name: str) -> Any:
        return self._metadata.get(self._prefix + name)

    def count(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, list) and len(set(map(str, value))) == 1:
            value = value[0]  # one for each layer, all the same
        if isinstance(value, list):
            raise UnsupportedError(f"the GGUF file has a {self._prefix}{name} that differs between layers")
        if type(value) is not int or value <= 0:
            raise EngineError(f"the GGUF file has {self._prefix}{name}={str(value)[:50]}, which should be a count")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise EngineError(f"the GGUF file has {self._prefix}{name}={str(value)[:50]}, which should be a number")
        return float(value)

    def has(self, *names: str) -> bool:
        """Whether one of these tensors is in the first layer."""
        return any(f"blk.0.{name}" in self.tensors for name in names)

    def rows_of(self, name: str) -> int:
        """Rows of a matrix of the first layer that has it, or of each of its experts'."""
        shapes = (tensor.shape for full, tensor in self.tensors.items() if full.endswith(f".{name}.weight"))
        shape = next(shapes, ())
        if len(shape) < 2:
            raise EngineError(f"the GGUF file has no matrix {name}")
        return shape[-2]
