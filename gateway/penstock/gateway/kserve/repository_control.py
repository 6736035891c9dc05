"""What clients may say when they load or unload a model, for HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.engines.errors import InvalidRequestError

_FILE = "file:"
MAX_OVERRIDE_FILES = 1024


@dataclass(slots=True)
class LoadOverride:
    """What replaces the model's own files."""

    config: str | None = None
    """A ModelConfig in JSON."""
    files: dict[str, bytes] = field(default_factory=dict)
    """By `<version>/<name>`; the store checks where such a name leads."""


def load_override(parameters: Mapping[str, str | bytes | int | bool | float]) -> LoadOverride:
    """Of `config` and `file:<version>/<name>`, whose contents HTTP sends in base64 and gRPC as they are.

    Raises InvalidRequestError, unlike Triton's HTTP front, which answers with an internal error.
    """
    override = LoadOverride()
    for name, value in parameters.items():
        if name == "config":
            if not isinstance(value, str):
                raise InvalidRequestError("the load parameter 'config' must be a string that holds JSON")
            override.config = value
        elif name.startswith(_FILE):
            if not isinstance(value, bytes):
                raise InvalidRequestError(f"the load parameter '{name[:128]}' must hold the bytes of a file")
            override.files[name.removeprefix(_FILE)] = value
        else:
            raise InvalidRequestError(f"unrecognized load parameter '{name[:64]}'")
    if len(override.files) > MAX_OVERRIDE_FILES:
        raise InvalidRequestError(f"a load request may bring at most {MAX_OVERRIDE_FILES} files")
    if override.files and override.config is None:
        raise InvalidRequestError("override files need the load parameter 'config'")
    return override


def unload_dependents(parameters: Mapping[str, object]) -> bool:
    """Raises InvalidRequestError."""
    for name, value in parameters.items():
        if name != "unload_dependents":
            raise InvalidRequestError(f"unrecognized unload parameter '{name[:64]}'")
        if not isinstance(value, bool):
            raise InvalidRequestError("the unload parameter 'unload_dependents' must be a boolean")
    return bool(parameters.get("unload_dependents", False))


def check_model_name(name: str) -> None:
    """Raises InvalidRequestError for a name that is empty or blank."""
    if not name.strip():
        raise InvalidRequestError("Model name cannot be empty. Please enter a valid name to deploy.")
