"""Settings of a quantized checkpoint, and its tensors by the matrix that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
        tensor = self.parts.get(part)
        if tensor is None:
            raise EngineError(f"{self.name} has no tensor {part}")
        if tensor.dtype not in dtypes:
            raise EngineError(f"{self.name}.{part} has dtype {tensor.dtype}, which should be {' or '.join(dtypes)}")
        if shape is not None and tensor.shape != shape:
            raise EngineError(f"{self.name}.{part} has shape {tensor.shape}, which should be {shape}")
        return tensor

    def matrix(self, part: str, dtypes: Sequence[str]) -> StoredTensor:
        """As `take`, of two axes that are not empty."""
        tensor = self.take(part, dtypes)
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise EngineError(f"{self.name}.{part} has shape {tensor.shape}, which is not that of a matrix")
        return tensor

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


Settings = Mapping[str, Any]


def choice(settings: Settings, keys: Sequence[str], allowed: Sequence[Any], default: Any = None) -> Any:
    """The first of `keys` that is there. Raises UnsupportedError for a value that is not `allowed`."""
    key, value = _first(settings, keys, default)
    if isinstance(value, bool) or value not in allowed:
        supported = ", ".join(map(str, allowed))
        raise UnsupportedError(
            f"quantization_config has {key}={str(value)[:50]}, which is not supported; supported are {supported}"
        )
    return value


def group_size_of(settings: Settings, keys: Sequence[str]) -> int:
    """Columns of a group; -1: all of them. Raises UnsupportedError for what is no number of columns."""
    key, value = _first(settings, keys, 128)
    if type(value) is not int or (value < 1 and value != -1):
        raise UnsupportedError(f"quantization_config has {key}={str(value)[:50]}, which is not a number of columns")
    return value


def flag(settings: Settings, key: str, default: bool) -> bool:
    """Raises UnsupportedError for what is neither true nor false."""
    value = settings.get(key, default)
    if not isinstance(value, bool):
        raise UnsupportedError(f"quantization_config has {key}={str(value)[:50]}, which is neither true nor false")
    return value


def refuse(settings: Settings, meanings: Mapping[str, str]) -> None:
    """Raises UnsupportedError for a key of `meanings` that has a value."""
    for key, meaning in meanings.items():
        if settings.get(key):
            raise UnsupportedError(f"quantization_config has {key}: {meaning} are not supported")


def _first(settings: Settings, keys: Sequence[str], default: Any) -> tuple[str, Any]:
    key = next((key for key in keys if settings.get(key) is not None), keys[0])
    value = settings.get(key)
    return key, default if value is None else value
