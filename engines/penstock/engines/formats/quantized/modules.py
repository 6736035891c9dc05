"""The tensors of a checkpoint by the matrix that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.engines.errors import EngineError, UnsupportedError
from penstock.engines.formats.safetensors_file import Shape, StoredTensor


@dataclass(frozen=True)
class Module:
    """One quantized matrix."""

    name: str
    parts: dict[str, StoredTensor] = field(default_factory=dict)
    """By the last part of their names, without the bias."""

    def take(self, part: str, dtypes: Sequence[str], shape: Shape | None = None) -> StoredTensor:
        """Raises EngineError where it is missing, or of another type or shape."""
        found = self.parts.get(part)
        if found is None:
            raise EngineError(f"{self.name} has no tensor {part}")
        if found.dtype not in dtypes:
            raise EngineError(f"{self.name}.{part} has dtype {found.dtype}, which should be {' or '.join(dtypes)}")
        if shape is not None and found.shape != shape:
            raise EngineError(f"{self.name}.{part} has shape {found.shape}, which should be {shape}")
        return found

    def matrix(self, part: str, dtypes: Sequence[str]) -> StoredTensor:
        """As `take`, of two axes that are not empty."""
        found = self.take(part, dtypes)
        if len(found.shape) != 2 or 0 in found.shape:
            raise EngineError(f"{self.name}.{part} has shape {found.shape}, which is not that of a matrix")
        return found

    def check_parts(self, known: Sequence[str]) -> None:
        """Raises UnsupportedError for parts of another meaning."""
        unknown = sorted(set(self.parts) - set(known))
        if unknown:
            raise UnsupportedError(
                f"{self.name} has {unknown[0]}, which is not supported; known are {', '.join(known)}"
            )


def split_modules(
    stored: Mapping[str, StoredTensor], is_quantized: Callable[[str, StoredTensor], bool]
) -> tuple[list[Module], dict[str, StoredTensor]]:
    """The quantized matrices, and all other tensors, biases among them. `is_quantized`: of the last part of a tensor's
    name, whether it makes its module one."""
    modules = {
        name: Module(name)
        for name, part, tensor in ((*_split(full), tensor) for full, tensor in stored.items())
        if is_quantized(part, tensor)
    }
    rest = {}
    for full, tensor in stored.items():
        name, part = _split(full)
        if name in modules and part != "bias":
            modules[name].parts[part] = tensor
        else:
            rest[full] = tensor
    return list(modules.values()), rest


def _split(full: str) -> tuple[str, str]:
    name, _, part = full.rpartition(".")
    return name, part
