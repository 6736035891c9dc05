"""A backend in a `backend.py`: beside a model's config.pbtxt, or in the folder of `--backend-directory`."""

from __future__ import annotations

import sys
import traceback
from hashlib import sha256
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import CodeType, ModuleType

from penstock.classic.base import Backend

FILENAME = "backend.py"


class _Uncached(SourceFileLoader):
    """Without bytecode in the folder, which would be out of date when a file changes twice in a second."""

    def get_code(self, fullname: str) -> CodeType:
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def load_backend_file(path: Path, owner: str) -> type[Backend]:
    """The one Backend that the file defines; each call runs the file again.

    `owner` is what messages call its owner (`model 'm'`), of whom there is one with this name. Raises ValueError, with
    the line, when it cannot be run or has no such class.
    """
    name = f"penstock_backend_file_{sha256(owner.encode()).hexdigest()[:16]}"
    loader = _Uncached(name, str(path))
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    # dataclasses and pickling look for it there; the last one of an owner stays, and no other
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except (Exception, SystemExit) as error:  # sys.exit() would end the server
        raise ValueError(f"{FILENAME} of {owner} cannot be loaded: {_told(error, path)}") from error
    return _backend(module, owner)


def _told(error: BaseException, path: Path) -> str:
    """The error and its line, without folders of this machine."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {error}".replace(f"{path.parent}/", "")[:400]


def _backend(module: ModuleType, owner: str) -> type[Backend]:
    found = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, Backend) and value.__module__ == module.__name__
    ]
    if len(found) != 1:
        names = ", ".join(value.__name__ for value in found) or "none"
        raise ValueError(f"{FILENAME} of {owner} must define one class that derives from Backend, and has {names}")
    return found[0]
