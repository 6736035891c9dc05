"""Run by path, with the interpreter of the model's environment.

That interpreter may know nothing of Penstock, so the package is made known under a name of its own. Processes that a
model starts with multiprocessing run this file as well, and so find the modules that the model imports.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_NAME = "penstock_worker"


def _install() -> None:
    folder = Path(__file__).resolve().parent
    sys.path[:] = [entry for entry in sys.path if not entry or Path(entry).resolve() != folder]
    spec = importlib.util.spec_from_file_location(
        _NAME, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or spec.loader is None:
        sys.exit("the worker's files are not complete")
    package = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = package
    spec.loader.exec_module(package)
    utils = importlib.import_module(f"{_NAME}.utils")
    sys.modules["triton_python_backend_utils"] = utils
    sys.modules["c_python_backend_utils"] = utils


_install()

if __name__ == "__main__":
    importlib.import_module(f"{_NAME}.serve").main(sys.argv[1:])
