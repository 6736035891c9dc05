"""Imports a model's file as Triton does: as `<version>.<file>`, with the working directory at the front of the path and
the file's folders at its end."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from . import control


def load(program: str, version_folder: str) -> Any:
    """The class TritonPythonModel. Raises whatever the file raises, and TypeError when it has no such class."""
    control.model_dir[:] = [version_folder]
    path = Path(program)
    folder = Path(version_folder)
    sys.path.insert(0, "")
    if path.parent == folder:
        sys.path += [str(folder), str(folder.parent)]
        _install_package(folder)
        module = importlib.import_module(f"{folder.name}.{path.stem}")
    else:
        # the program of a python-based backend, which is the same for all its models
        sys.path.append(str(path.parent))
        module = _executed(spec_from_file_location(path.stem, path))
    try:
        return module.TritonPythonModel
    except AttributeError:
        raise TypeError(f"{path.name} has no class TritonPythonModel") from None


def _install_package(folder: Path) -> None:
    """Makes the version known as a package, so that a folder `1` in the working directory is not taken for it."""
    init = folder / "__init__.py"
    if init.is_file():
        _executed(spec_from_file_location(folder.name, init))
    else:
        spec = ModuleSpec(folder.name, None, is_package=True)
        spec.submodule_search_locations = [str(folder)]
        sys.modules[folder.name] = module_from_spec(spec)


def _executed(spec: ModuleSpec | None) -> ModuleType:
    if spec is None or spec.loader is None:
        raise ImportError("the model's file is no Python file")
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def place(error: BaseException) -> str:
    """` (line 7 of model.py)`: where in the model's own files it was raised; nothing where that is not known."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" (line {error.lineno} of {os.path.basename(error.filename)})"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(tuple(control.model_dir)):
            return f" (line {frame.lineno} of {os.path.basename(frame.filename)})"
    return ""
