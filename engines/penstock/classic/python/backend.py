"""The python backend: `backend: "python"`, and python-based backends built on it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, ClassVar

from google.protobuf import json_format

from penstock.classic.base import AsyncInstance, Backend, BackendModel, InstanceContext, ModelContext, abandoned
from penstock.classic.model_config import ModelConfig, config_dict, config_json
from penstock.classic.python.instance import PythonInstance
from penstock.classic.python.process import Environment, Launch, PythonOptions, find_environment, lines_of, prepared
from penstock.classic.python.session import ModelProgram
from penstock.classic.python.worker.wire import FRAME, decode, frame
from penstock.classic.signature import ModelSignature
from penstock.engines.host.black_box import BlackBox
from penstock.engines.host.failure_text import one_line

_HOOK = b"auto_complete_config"
_COMPLETED = ("max_batch_size", "input", "output", "dynamic_batching", "model_transaction_policy")
"""What auto_complete_config may fill in."""


class PythonBackend(Backend):
    """Runs a model's `model.py` (`default_model_filename`). A python-based backend is a subclass with a `program` of
    its own, or a file `<name>/model.py` in the folder of the option `backend-directory`."""

    program: ClassVar[Path | None] = None

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(options)
        self._options = PythonOptions.parse(options)

    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        program = self._program(config, version_folder)
        complete = bool(config.input) and bool(config.output)
        if complete and _HOOK not in program.read_bytes():
            return
        environment = _environment(config, version_folder.parent)
        try:
            launch = Launch(environment, self._options, f"penstock.models.{config.name}")
            options = {
                "program": str(program),
                "version_folder": str(version_folder),
                "config": config_json(config),
                "name": config.name,
            }
            completed = run_auto_complete(launch, options)
        finally:
            environment.remove()
        if completed is not None:
            _complete(config, completed)

    def load_model(self, context: ModelContext) -> BackendModel:
        return PythonModel(context, self._options, self._program(context.config, context.version_folder))

    def _program(self, config: ModelConfig, version_folder: Path) -> Path:
        """Raises ValueError when there is no such file."""
        if self.program is not None:
            return self.program
        name = config.default_model_filename or "model.py"
        if config.runtime not in ("", "python", "model.py", name):
            raise ValueError(f"model '{config.name}': the python backend has no runtime '{config.runtime[:64]}'")
        if not name.endswith(".py") or "/" in name or name.startswith("."):
            raise ValueError(f"Model name must end with '.py'. Model name is \"{name[:64]}\".")
        own = version_folder / name
        folder = self._options.backend_directory
        shared = None if folder is None or config.backend == "python" else folder / config.backend / "model.py"
        program = next((path for path in (own, shared) if path is not None and path.is_file()), None)
        if program is None:
            raise ValueError(f"Python model file not found in '{config.name}/{version_folder.name}/{name}'")
        return program


class PythonModel(BackendModel):
    """A version: its interpreter, and what all its instances are told."""

    def __init__(self, context: ModelContext, options: PythonOptions, program: Path) -> None:
        self._context = context
        self._options = options
        self._program = program
        self._signature = ModelSignature(context.config)
        self._config = config_json(context.config)
        self._environment = _environment(context.config, context.model_folder)

    def load_instance(self, context: InstanceContext) -> AsyncInstance:
        model = self._context
        init = {
            "name": context.name,
            "file": self._program.name,
            "program": str(self._program),
            "version_folder": str(model.version_folder),
            "decoupled": self._signature.decoupled,
            "sequences": self._signature.sequences,
            "iterative": self._signature.iterative,
            "outputs": list(self._signature.outputs),
            "args": {
                "model_config": self._config,
                "model_instance_kind": context.kind,
                "model_instance_name": context.name,
                "model_instance_device_id": str(context.device_id),
                "model_repository": str(model.model_folder),
                "model_version": str(model.version),
                "model_name": model.name,
            },
        }
        launch = Launch(self._environment, self._options, f"penstock.models.{context.name}")
        return PythonInstance(ModelProgram(context.name, launch, init, self._signature, model.host))

    def unload(self) -> None:
        self._environment.remove()


def _environment(config: ModelConfig, model_folder: Path) -> Environment:
    parameters = config.parameters
    path = parameters["EXECUTION_ENV_PATH"].string_value if "EXECUTION_ENV_PATH" in parameters else ""
    return find_environment(path, model_folder)


def _complete(config: ModelConfig, answer: dict[str, Any]) -> None:
    """Raises ValueError when the model has made something of it that is no configuration."""
    settings = {name: answer[name] for name in _COMPLETED if name in answer}
    try:
        completed = json_format.ParseDict({**config_dict(config), **settings}, ModelConfig())
    except json_format.ParseError as error:
        raise ValueError(
            f"auto_complete_config of model '{config.name}' gave no valid configuration: {error}"
        ) from None
    config.CopyFrom(completed)


_IMPORT_SECONDS = 600.0
"""For the model's imports, which Triton does not limit at all; they are long where a file system is cold."""
_MORE_TIME = "--backend-config=python,stub-timeout-seconds=<seconds> gives it more time"


def run_auto_complete(launch: Launch, options: dict[str, Any]) -> dict[str, Any] | None:
    """The completed configuration; None when the model has no auto_complete_config. In a thread.

    Raises ValueError: the model's own error, or that there was no answer in time.
    """
    limit = launch.options.stub_timeout_seconds
    with tempfile.TemporaryFile() as output:
        with prepared(launch, BlackBox()) as (command, variables, ours, files, passed):
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=passed,
                env=variables,
                start_new_session=True,
            )
        if (gone := abandoned.get(None)) is not None:
            gone.add_done_callback(lambda _: process.kill())
        try:
            kind, fields = _converse(ours, options, limit)
        except (EOFError, ConnectionError):
            raise ValueError(f"the process for auto_complete_config ended early{launch.environment.hint}") from None
        finally:
            ours.close()
            files.close()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            _log(launch.logger_name, output)
    if kind == "completed":
        completed: dict[str, Any] | None = fields[0]
        return completed
    text, trace = fields
    logging.getLogger(launch.logger_name).debug("%s", trace)
    raise ValueError(one_line(text))


def _converse(sock: socket.socket, options: dict[str, Any], limit: float) -> tuple[str, list[Any]]:
    _receive(sock, limit, f"the process for auto_complete_config did not start within {limit:g} s; {_MORE_TIME}")
    sock.sendall(frame(["auto_complete", [], [], options]))
    kind, fields = _receive(sock, _IMPORT_SECONDS, f"the model's imports did not end within {_IMPORT_SECONDS:g} s")
    if kind != "imported":
        return kind, fields
    return _receive(sock, limit, f"auto_complete_config gave no answer within {limit:g} s; {_MORE_TIME}")


def _receive(sock: socket.socket, limit: float, complaint: str) -> tuple[str, list[Any]]:
    """The next message. Raises ValueError, with the complaint, after `limit` seconds."""
    deadline = time.monotonic() + limit
    try:
        return _message(sock, deadline)
    except TimeoutError:
        raise ValueError(complaint) from None


def _message(sock: socket.socket, deadline: float) -> tuple[str, list[Any]]:
    head, tail = FRAME.unpack(_exactly(sock, FRAME.size, deadline))
    kind, _, _, *fields = decode(_exactly(sock, head + tail, deadline)[:head])
    return kind, fields


def _exactly(sock: socket.socket, size: int, deadline: float) -> bytes:
    received = b""
    while len(received) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        data = sock.recv(size - len(received))
        if not data:
            raise EOFError
        received += data
    return received


def _log(name: str, output: IO[bytes]) -> None:
    output.seek(0)
    logger = logging.getLogger(name)
    for line in output.read(1024 * 1024).splitlines():
        for text in lines_of(line):
            logger.info("%s", text)
