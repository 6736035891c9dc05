"""The interpreter that a model runs with: EXECUTION_ENV_PATH, or the server's own."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

_MODEL_FOLDER = "$$TRITON_MODEL_DIRECTORY"


@dataclass(frozen=True)
class Environment:
    python: Path
    folder: Path | None = None
    """The environment's folder; None: the server's own."""
    unpacked: Path | None = None
    """A temporary folder, ours to delete."""

    def variables(self) -> dict[str, str]:
        """The process's environment variables."""
        # no bytecode: a repository may be polled for changes, and a file that changes twice in a second would be stale
        found = dict(os.environ) | {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        if self.folder is not None:
            for name in ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX"):
                found.pop(name, None)
            found["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{found.get('PATH', os.defpath)}"
            found["CONDA_PREFIX" if (self.folder / "conda-meta").is_dir() else "VIRTUAL_ENV"] = str(self.folder)
        return found

    def remove(self) -> None:
        if self.unpacked is not None:
            shutil.rmtree(self.unpacked, ignore_errors=True)


def find_environment(path: str, model_folder: Path) -> Environment:
    """`path` is the value of EXECUTION_ENV_PATH: a folder, or a tar archive, made by conda-pack or of a virtual
    environment; "": none. Raises ValueError when there is no interpreter in it."""
    if not path:
        return Environment(Path(sys.executable))
    place = Path(path.replace(_MODEL_FOLDER, str(model_folder)))
    if place.is_dir():
        return Environment(_interpreter(place), place)
    if not place.is_file():
        raise ValueError(f"EXECUTION_ENV_PATH names no folder and no archive: '{path}'{_relative_hint(path)}")
    unpacked = Path(tempfile.mkdtemp(prefix="penstock-env-"))
    try:
        with tarfile.open(place) as archive:
            archive.extractall(unpacked, filter="tar")
        return Environment(_interpreter(unpacked), unpacked, unpacked)
    except (tarfile.TarError, OSError) as error:
        shutil.rmtree(unpacked, ignore_errors=True)
        raise ValueError(f"EXECUTION_ENV_PATH cannot be unpacked: {error}") from error
    except BaseException:
        shutil.rmtree(unpacked, ignore_errors=True)
        raise


def _relative_hint(path: str) -> str:
    if os.path.isabs(path) or path.startswith(_MODEL_FOLDER):
        return ""
    return f", seen from the server's working directory; in the model's folder it is {_MODEL_FOLDER}/{path}"


def _interpreter(folder: Path) -> Path:
    for name in ("python", "python3"):
        found = folder / "bin" / name
        if os.access(found, os.X_OK):
            return found
    raise ValueError("EXECUTION_ENV_PATH has no bin/python")
