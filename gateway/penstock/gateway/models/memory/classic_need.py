"""An estimate of the memory that a classic model will need, by its files, before anything is loaded."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from penstock.classic.base import ModelContext
from penstock.classic.instances import instance_contexts
from penstock.classic.model_files import TooManyFilesError, files_below
from penstock.engines.errors import InvalidRequestError
from penstock.engines.host.memory import parse_memory
from penstock.gateway.models.memory.budget import Demand, MemoryNeeds

PARAMETER = "penstock_memory"
"""In a configuration's `parameters`: what the model takes in all, as `2GiB`, where its files do not tell."""

PYTHON_PROCESS = 48 << 20
"""Of a Python model's process with numpy and nothing else."""


def classic_need(context: ModelContext, *, in_processes: bool) -> Demand:
    """All files of the version, once for each instance, and `in_processes` a process for each; or what PARAMETER says.
    Memory of GPUs is not counted. Reads the folder: not for the event loop.

    Raises InvalidRequestError for a PARAMETER that is no amount of memory.
    """
    hints = f"the parameter {PARAMETER} of config.pbtxt, a smaller instance_group.count"
    parameters = context.config.parameters
    if PARAMETER in parameters:
        try:
            weights = parse_memory(parameters[PARAMETER].string_value, free=0)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"model '{context.name}', parameter {PARAMETER}: {error.message}") from None
        return Demand(host=MemoryNeeds(weights=weights), hints=hints)
    count = len(instance_contexts(context.config))
    processes = PYTHON_PROCESS * count if in_processes else 0
    return Demand(host=MemoryNeeds(weights=_file_bytes(context.version_folder) * count, rest=processes), hints=hints)


def _file_bytes(folder: Path) -> int:
    total = 0
    with suppress(OSError, TooManyFilesError):  # what has gone meanwhile, loading will tell
        for path in files_below([folder]):
            total += path.stat().st_size
    return total
