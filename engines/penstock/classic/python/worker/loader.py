"""Imports a model's file as Triton does: as `<version>.<file>`, with its folders at the end of the path."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from . import control


def load(program: str, version_folder: str) -> Any:
    """The class TritonPythonModel. Raises whatever the file raises, and TypeError when it has no such class."""
    control.model_dir[:] = [version_folder]
    path = Path(program)
    folder = Path(version_folder)
    if path.parent == folder:
        sys.path += [str(folder), str(folder.parent)]
        module = importlib.import_module(f"{folder.name}.{path.stem}")
    else:
        # the program of a python-based backend, which is the same for all its models
        sys.path.append(str(path.parent))
        module = importlib.import_module(path.stem)
    try:
        return module.TritonPythonModel
    except AttributeError:
        raise TypeError(f"{path.name} has no class TritonPythonModel") from None
