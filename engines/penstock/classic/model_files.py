"""Files of a model that its configuration names."""

from __future__ import annotations

from pathlib import Path

from penstock.classic.model_config import ModelConfig
from penstock.engines.errors import InvalidRequestError

_LONGEST_PATH, _LONGEST_NAME = 1024, 255
"""Characters, and bytes: file systems raise errors of their own for longer ones."""


def check_file_name(field: str, path: str) -> None:
    """A path that a configuration names must stay in its folder. Raises InvalidRequestError."""
    parts = path.split("/")
    is_too_long = len(path) > _LONGEST_PATH or any(len(part.encode()) > _LONGEST_NAME for part in parts)
    if is_too_long or not path.isprintable() or any(part in ("", ".", "..") for part in parts):
        raise InvalidRequestError(f"{field} must be a relative path inside the model's folder", param=field)


def model_path(config: ModelConfig, version_folder: Path, *defaults: str) -> Path:
    """The file or folder `default_model_filename`, or the first of `defaults` that is there.

    Raises ValueError when there is none, or when its name leads out of the version's folder.
    """
    names = [config.default_model_filename] if config.default_model_filename else defaults
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"default_model_filename '{name}' leads out of the model's folder")
        if (version_folder / name).exists():
            return version_folder / name
    where = f"{version_folder.name}/{names[0]}"
    raise ValueError(f"unable to find '{where}' for model '{config.name}'")
