"""Imports a model's file as Triton does: as `<version>.<file>`, with its folders at the end of the path."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
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


def place(error: BaseException) -> str:
    """` (line 7 of model.py)`: where in the model's own files it was raised; nothing where that is not known."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" (line {error.lineno} of {os.path.basename(error.filename)})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(tuple(control.model_dir)):
            return f" (line {frame.lineno} of {os.path.basename(frame.filename)})"
    return ""
