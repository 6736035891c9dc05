"""Values of `quantization_config`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.engines.errors import UnsupportedError

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
