"""A model's serialized pipeline: from its file, or made by its program."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from penstock.classic.dali.library import load_dali
from penstock.classic.model_config import ModelConfig
from penstock.classic.model_files import model_path

FILENAME = "model.dali"
PROGRAM = "dali.py"
_LIMIT_SECONDS = 120
_SERIALIZE = """
import importlib.util, sys
from nvidia.dali._utils.autoserialize import invoke_autoserialize
spec = importlib.util.spec_from_file_location("autoserialized", sys.argv[1])
module = sys.modules["autoserialized"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
invoke_autoserialize(module, sys.argv[2])
"""


def serialized_pipeline(config: ModelConfig, version_folder: Path) -> bytes:
    """Of `model.dali`, or of the function that `dali.py` marks with `@autoserialize`. In a thread.

    Raises ValueError when there is none, or its program fails.
    """
    path = model_path(config, version_folder, FILENAME, PROGRAM)
    return _made_by(path) if path.suffix == ".py" else path.read_bytes()


def _made_by(program: Path) -> bytes:
    """In a process of its own, for the program may do anything."""
    load_dali()
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / FILENAME
        process = subprocess.Popen(
            [sys.executable, "-c", _SERIALIZE, str(program), str(target)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            _, told = process.communicate(timeout=_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise ValueError(f"{program.name} made no pipeline within {_LIMIT_SECONDS} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode or not target.is_file():
            last = told.strip().splitlines()[-1:] or ["it ended early"]
            raise ValueError(f"{program.name} made no pipeline: {last[0].replace(str(program), program.name)[:400]}")
        return target.read_bytes()
