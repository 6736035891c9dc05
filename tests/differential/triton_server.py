"""A real Triton 2.51 from a wheel: its virtual environment, and its process.

`python tests/differential/triton_server.py FOLDER` makes the environment; TRITON_VENV names it to the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

VARIABLE = "TRITON_VENV"
REQUIREMENTS = ("--no-deps", "nvidia-pytriton==0.7.0", "numpy<2")


def make(folder: Path) -> None:
    """Installs the wheel, and puts the stub of this Python next to the Python backend, where Triton looks for it."""
    venv.create(folder, with_pip=True)
    subprocess.run([folder / "bin/python", "-m", "pip", "install", "-q", *REQUIREMENTS], check=True)
    server = _site(folder) / "pytriton/tritonserver"
    backend = folder / "backends/python"
    shutil.copytree(server / "backends/python", backend, ignore=shutil.ignore_patterns("3.*"), dirs_exist_ok=True)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(server / "python_backend_stubs" / version / "triton_python_backend_stub", backend)
    for program in (backend / "triton_python_backend_stub", server / "bin/tritonserver"):
        program.chmod(0o755)


def environment() -> Path | None:
    """The environment that the variable names."""
    return Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None


def start(folder: Path, log: Path, *flags: str) -> subprocess.Popen[bytes]:
    """A server process of its own group, whose output goes to `log`."""
    site = _site(folder)
    libraries = (site / "nvidia_pytriton.libs", *_python_libraries(folder), os.environ.get("LD_LIBRARY_PATH", ""))
    environ = os.environ | {
        "LD_LIBRARY_PATH": ":".join(str(path) for path in libraries if str(path)),
        "PYTHONPATH": str(site),
        "VIRTUAL_ENV": str(folder),
        "PATH": f"{folder / 'bin'}:{os.environ.get('PATH', '')}",
    }
    server = site / "pytriton/tritonserver"
    folders = (f"--backend-directory={folder / 'backends'}", f"--cache-directory={server / 'caches'}")
    command = [server / "bin/tritonserver", *folders, *flags]
    with log.open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=environ, start_new_session=True)


def _site(folder: Path) -> Path:
    return next(folder.glob("lib/python3.*/site-packages"))


def _python_libraries(folder: Path) -> list[str]:
    """Where the interpreter's own library lies; the stub is linked to it."""
    script = "import sys, sysconfig; print(sysconfig.get_config_var('LIBDIR'), sys.base_prefix + '/lib', sep='\\n')"
    return subprocess.run(
        [folder / "bin/python", "-c", script], check=True, capture_output=True, text=True
    ).stdout.split()


if __name__ == "__main__":
    make(Path(sys.argv[1]))
