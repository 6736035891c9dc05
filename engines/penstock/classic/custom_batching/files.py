"""Where a model's own batching is: `batchstrategy.py`, in the place of Triton's `batchstrategy.so`."""

from __future__ import annotations

from pathlib import Path

from penstock.classic.model_config import ModelConfig
from penstock.engines.errors import InvalidRequestError, UnsupportedError

FILENAME = "batchstrategy.py"
LIBRARY = "batchstrategy.so"
PARAMETER = "TRITON_BATCH_STRATEGY_PATH"
"""Triton's. Here it names a Python file, from the model's folder."""


def find_strategy(config: ModelConfig, model_folder: Path, version_folder: Path) -> Path | None:
    """The file, or None for a model that has none. As in Triton, the version's folder is looked at first.

    A batchstrategy.py stands for a library that the parameter names, so that one repository serves both servers.

    Raises UnsupportedError for a library without such a file, InvalidRequestError where there is nothing to decide.
    """
    named = str(config.parameters[PARAMETER].string_value) if PARAMETER in config.parameters else ""
    folders = (version_folder, model_folder)
    found = next((path for folder in folders if (path := folder / FILENAME).is_file()), None)
    library = next((path for folder in folders if (path := folder / LIBRARY).is_file()), None)
    if named.endswith(".py"):
        found = _inside(model_folder, named, config.name)
    elif found is None and (named or (library is not None and config.HasField("dynamic_batching"))):
        raise UnsupportedError(
            f"model '{config.name}' has a library for custom batching ({named or LIBRARY}), which is not loaded here:"
            f" write its rules in Python, in a file {FILENAME} in the model's folder (docs/custom_batching.md)",
            param="parameters",
        )
    if found is None:
        return None
    if config.HasField("sequence_batching"):
        raise InvalidRequestError(
            f"{PARAMETER if named else FILENAME} cannot be specified with sequence batcher for {config.name}"
        )
    if not config.HasField("dynamic_batching") or config.max_batch_size < 1:
        raise InvalidRequestError(
            f"{PARAMETER if named else FILENAME} needs dynamic_batching and max_batch_size for {config.name}"
        )
    return found


def _inside(folder: Path, named: str, model: str) -> Path:
    parts = named.split("/")
    path = folder / named
    if not named.isprintable() or any(part in ("", ".", "..") for part in parts):
        raise InvalidRequestError(f"{PARAMETER} must be a relative path inside the model's folder for {model}")
    if not path.is_file():
        raise InvalidRequestError(f"{PARAMETER} of {model}: there is no file '{named[:256]}' in the model's folder")
    return path
