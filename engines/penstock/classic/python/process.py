"""A model's process: the backend's options, the interpreter (EXECUTION_ENV_PATH, or the server's own), the process
itself, spawned with a socket and two arenas, and its output in the server's log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextvars import Context
from dataclasses import dataclass
from pathlib import Path

from penstock.classic.parameters import FOR_ALL_BACKENDS
from penstock.classic.python.link import ArenaFiles
from penstock.engines.host.black_box import BlackBox

_MIB = 1024 * 1024
_MAX_BYTES = 2**40


@dataclass(frozen=True, slots=True)
class PythonOptions:
    shm_default_byte_size: int = _MIB
    """Bytes of shared memory that an instance starts with in each direction, when its first large tensor comes."""
    shm_growth_byte_size: int = _MIB
    """The least by which it grows."""
    shm_region_prefix_name: str = "penstock"
    """Shown as the memory's name in /proc/<pid>/maps."""
    stub_timeout_seconds: float = 30.0
    """For a process to start, before the model is imported; for `auto_complete_config`, without the imports; and for an
    orderly end."""
    backend_directory: Path | None = None
    """Where python-based backends are found, as `<name>/model.py`."""
    crash_folder: Path | None = None
    """Where it is kept what is known of a process that dies; None: nowhere."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> PythonOptions:
        """Raises ValueError for unknown names and values out of range."""
        parsed: dict[str, object] = {}
        for name, value in options.items():
            if name in ("shm-default-byte-size", "shm-growth-byte-size"):
                parsed[name.replace("-", "_")] = _number(name, value, 4096, _MAX_BYTES)
            elif name == "stub-timeout-seconds":
                parsed["stub_timeout_seconds"] = float(_number(name, value, 1, 86400))
            elif name == "shm-region-prefix-name":
                parsed["shm_region_prefix_name"] = _label(value)
            elif name == "backend-directory":
                parsed["backend_directory"] = Path(value)
            elif name == "crash-dir":
                parsed["crash_folder"] = Path(value)
            elif name not in FOR_ALL_BACKENDS:
                raise ValueError(f"the python backend has no option '{name[:64]}'")
        return cls(**parsed)  # type: ignore[arg-type]


def _number(name: str, value: str, low: int, high: int) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 16) or not low <= int(value) <= high:
        raise ValueError(f"the python backend's option '{name}' must be an integer from {low} to {high}")
    return int(value)


def _label(value: str) -> str:
    if not value.isprintable() or not 0 < len(value) <= 100:
        raise ValueError("the python backend's option 'shm-region-prefix-name' must be 1 to 100 printable characters")
    return value


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
        variables = dict(os.environ) | {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        if self.folder is not None:
            for name in ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "CONDA_PREFIX"):
                variables.pop(name, None)
            if not self.activation:  # conda-pack's script does nothing where these are there
                variables["PATH"] = f"{self.folder / 'bin'}{os.pathsep}{variables.get('PATH', os.defpath)}"
                variables["CONDA_PREFIX" if (self.folder / "conda-meta").is_dir() else "VIRTUAL_ENV"] = str(self.folder)
        return variables

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
        path = folder / "bin" / name
        if os.access(path, os.X_OK):
            return path
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


_MAX_LINE = 8192
"""Characters; a longer line is cut into several."""


def lines_of(data: bytes) -> list[str]:
    """A line as it may stand in the log: not too long, and without control characters, which could pass for lines of
    the server's own."""
    text = data.decode("utf-8", "replace").rstrip()
    if not text.isprintable():
        text = "".join(char if char.isprintable() or char == "\t" else "�" for char in text)
    return [text[start : start + _MAX_LINE] for start in range(0, len(text), _MAX_LINE)]


class OutputLog(asyncio.Protocol):
    """Reads the pipe that is a process's stdout and stderr."""

    def __init__(self, name: str, reader: int, writer: int) -> None:
        self._logger = logging.getLogger(name)
        self._nobody = Context()
        """For lines that belong to no request: the pipe is read in the context of the one that has loaded the model."""
        self._reader = reader
        self.writer = writer
        self._rest = b""

    @classmethod
    def open(cls, name: str) -> OutputLog:
        reader, writer = os.pipe()
        return cls(name, reader, writer)

    async def start(self) -> None:
        """Begins to read; the process has its own copy of the writing end."""
        os.close(self.writer)
        await asyncio.get_running_loop().connect_read_pipe(lambda: self, os.fdopen(self._reader, "rb", 0))

    def close(self) -> None:
        os.close(self._reader)
        os.close(self.writer)

    def data_received(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        if len(rest) > _MAX_LINE:
            lines.append(rest)
            rest = b""
        self._rest = rest
        for line in lines:
            self._log(line)

    def connection_lost(self, error: Exception | None) -> None:
        if self._rest:
            self._log(self._rest)
            self._rest = b""

    def _log(self, line: bytes) -> None:
        for text in lines_of(line):
            self._nobody.run(self._logger.info, "%s", text)


_WORKER = Path(__file__).parent / "worker" / "__main__.py"


@dataclass
class Launch:
    """What is needed to start a model's process."""

    environment: Environment
    options: PythonOptions
    logger_name: str


@contextlib.contextmanager
def prepared(
    launch: Launch, box: BlackBox
) -> Iterator[tuple[list[str], dict[str, str], socket.socket, ArenaFiles, list[int]]]:
    """Command line, environment, our end of the socket, the arenas' files, and the descriptors to hand over."""
    ours, theirs = socket.socketpair()
    try:
        files = ArenaFiles(launch.options.shm_region_prefix_name)
    except BaseException:
        ours.close()
        theirs.close()
        raise
    try:
        passed = [theirs.fileno(), files.down, files.up, box.descriptor]
        sizes = (launch.options.shm_default_byte_size, launch.options.shm_growth_byte_size)
        command = launch.environment.command(str(_WORKER), *map(str, (*passed, os.getpid(), *sizes)))
        yield command, launch.environment.variables(), ours, files, passed
    except BaseException:
        ours.close()
        files.close()
        raise
    finally:
        theirs.close()


class ModelProcess:
    """A running one, on the event loop."""

    def __init__(
        self, process: asyncio.subprocess.Process, sock: socket.socket, files: ArenaFiles, box: BlackBox
    ) -> None:
        self._process = process
        self.box = box
        self.socket = sock
        self.files = files

    @classmethod
    async def spawn(cls, launch: Launch) -> ModelProcess:
        """Raises OSError when there can be no process."""
        box = BlackBox()
        with prepared(launch, box) as (command, variables, ours, files, passed):
            output = OutputLog.open(launch.logger_name)
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    stdin=subprocess.DEVNULL,
                    stdout=output.writer,
                    stderr=output.writer,
                    pass_fds=passed,
                    env=variables,
                    start_new_session=True,
                )
            except BaseException:
                output.close()
                raise
            await output.start()
            return cls(process, ours, files, box)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        """The process and all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def end(self, patience: float) -> None:
        """Waits for it to end, and kills it after `patience` seconds, or when nobody waits any more; its children are
        killed anyway."""
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), patience)
        finally:
            self.kill()
        await self._process.wait()
