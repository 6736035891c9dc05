"""Where a model's own batching is: `batchstrategy.py`, in the place of Triton's `batchstrategy.so`."""

from __future__ import annotations

from pathlib import Path

from penstock.classic.model_config import ModelConfig
from penstock.classic.model_files import check_file_name
from penstock.engines.errors import InvalidRequestError, UnsupportedError

FILENAME = "batchstrategy.py"
LIBRARY = "batchstrategy.so"
PARAMETER = "TRITON_BATCH_STRATEGY_PATH"
"""Triton's. Here it names a Python file, from the model's folder."""
_NO_LIBRARY = (
    "model '{model}' has a library for custom batching ({library}), which is not loaded here: write its rules in"
    f" Python, in a file {FILENAME} in the model's folder (docs/batching.md#custom-batching)"
)


def find_strategy(config: ModelConfig, model_folder: Path, version_folder: Path) -> Path | None:
    """The file, or None for a model that has none. As in Triton, the version's folder is looked at first.

    A batchstrategy.py stands for a library that the parameter names, so that one repository serves both servers.

    Raises UnsupportedError for a library without such a file, InvalidRequestError for what makes no sense.
    """
    named = str(config.parameters[PARAMETER].string_value) if PARAMETER in config.parameters else None
    if named is not None and config.HasField("sequence_batching"):
        raise InvalidRequestError(
            f"{PARAMETER} cannot be specified with sequence batcher, using default batching strategy"
        )
    if named is not None and not named.isprintable():
        raise InvalidRequestError(f"{PARAMETER} of {config.name} has unprintable characters")
    if named is not None and named.endswith(".py"):
        check_file_name(PARAMETER, named)
        found: Path | None = model_folder / named
        if not (model_folder / named).is_file():
            raise InvalidRequestError(f"{PARAMETER} of {config.name}: there is no file '{named}' in the model's folder")
    else:
        found = _first(FILENAME, version_folder, model_folder)
        library = named or _first(LIBRARY, version_folder, model_folder)
        # A library that is only there Triton asks about dynamic batches, and about nothing else.
        if found is None and (named is not None or (library and config.HasField("dynamic_batching"))):
            raise UnsupportedError(_NO_LIBRARY.format(model=config.name, library=named or LIBRARY), param="parameters")
    if found is not None and (not config.HasField("dynamic_batching") or config.max_batch_size < 1):
        raise InvalidRequestError(f"{found.name} needs dynamic_batching and max_batch_size for {config.name}")
    return found


def _first(name: str, *folders: Path) -> Path | None:
    return next((path for folder in folders if (path := folder / name).is_file()), None)
