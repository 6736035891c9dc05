"""The interpreter that a model runs with: EXECUTION_ENV_PATH, or the server's own."""

from __future__ import annotations

import os
import shlex
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
    activation: str = ""
    """What bash runs before the interpreter; "": nothing."""

    def command(self, *arguments: str) -> list[str]:
        """Runs the interpreter with these arguments, in the process that this command starts."""
        command = [str(self.python), *arguments]
        return ["bash", "-c", f"{self.activation}exec {shlex.join(command)}"] if self.activation else command

    def variables(self) -> dict[str, str]:
        """The process's environment variables."""
        # no bytecode: a repository may be polled for changes, and a file that changes twice in a second would be stale
        found = dict(os.environ) | {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        if self.folder is not None:
            for name in ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX"):
                found.pop(name, None)
            if not self.activation:  # conda-pack's script does nothing where these are there
                found["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{found.get('PATH', os.defpath)}"
                found["CONDA_PREFIX" if (self.folder / "conda-meta").is_dir() else "VIRTUAL_ENV"] = str(self.folder)
        return found

    @property
    def hint(self) -> str:
        """Where to look when a process ends before it has said anything."""
        return "; what the scripts of EXECUTION_ENV_PATH have printed is in the log" if self.activation else ""

    def remove(self) -> None:
        if self.unpacked is not None:
            shutil.rmtree(self.unpacked, ignore_errors=True)


def find_environment(path: str, model_folder: Path) -> Environment:
    """`path` is the value of EXECUTION_ENV_PATH: a folder, or a tar archive, made by conda-pack or of a virtual
    environment; "": none. Raises ValueError when there is no interpreter in it, or no bash for its scripts."""
    if not path:
        return Environment(Path(sys.executable))
    place = Path(os.path.abspath(path.replace(_MODEL_FOLDER, str(model_folder))))
    if place.is_dir():
        return Environment(_interpreter(place), place, activation=_activation(place))
    if not place.is_file():
        raise ValueError(f"EXECUTION_ENV_PATH names no folder and no archive: '{path}'{_relative_hint(path)}")
    unpacked = Path(tempfile.mkdtemp(prefix="penstock-env-"))
    try:
        with tarfile.open(place) as archive:
            archive.extractall(unpacked, filter="tar")
        return Environment(_interpreter(unpacked), unpacked, unpacked, _activation(unpacked))
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


def _activation(folder: Path) -> str:
    """Triton sources `bin/activate`, and conda-pack's then sources the scripts of `etc/conda/activate.d`; where none
    has, this does. A virtual environment's script names the folder that it was made in, which an archive has left."""
    place = shlex.quote(str(folder))
    lines = []
    if (folder / "bin" / "activate").is_file():
        lines.append(f". {place}/bin/activate || exit")
    if scripts := sorted((folder / "etc" / "conda" / "activate.d").glob("*.sh")):
        sourced = "; ".join(f". {place}/etc/conda/activate.d/{shlex.quote(script.name)}" for script in scripts)
        lines.append(f'[ "$CONDA_PREFIX" -ef {place} ] || {{ export CONDA_PREFIX={place}; {sourced}; }}')
    if not lines:
        return ""
    if shutil.which("bash") is None:
        raise ValueError("EXECUTION_ENV_PATH has scripts that activate it, and there is no bash to run them")
    lines.append(f'[ -z "$VIRTUAL_ENV" ] || export VIRTUAL_ENV={place}')
    lines.append(f'case "$PATH" in {place}/bin:*) ;; *) export PATH={place}/bin:"$PATH" ;; esac')
    return "\n".join([*lines, ""])
