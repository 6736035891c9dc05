"""The life of a model's process: connect, load, execute, finalize.

A model's file is imported as Triton does it: as `<version>.<file>`, with the working directory at the front of the path
and the file's folders at its end.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import socket
import sys
import threading
import traceback
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from . import control, host
from .connection import Connection, Message
from .errors import MisusedError, clean, public_text, report
from .executor import Executor
from .model_config import ModelConfig
from .wire import ReceiveArena, SendArena


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


class ReadyProbe:
    """Answers the server's questions, each in a thread of its own: the model may be executing meanwhile."""

    def __init__(self, connection: Connection, model: Any) -> None:
        self._connection = connection
        self._model = model
        connection.handlers["is_ready"] = self._begin
        connection.read_in_thread()

    def _begin(self, message: Message) -> None:
        threading.Thread(target=self._answer, name="penstock-is-ready", daemon=True).start()

    def _answer(self) -> None:
        try:
            ready = self._model.is_ready()
            if asyncio.iscoroutine(ready):
                ready = asyncio.run(ready)
            if not isinstance(ready, bool):
                raise MisusedError(f"is_ready() must return a bool, not {type(ready).__name__}")
        except BaseException as error:  # a model that calls sys.exit() has answered, too
            report(error)
            ready = False
        self._connection.send("is_ready", ready)


_PR_SET_PDEATHSIG = 1
_USUAL = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
"""Handlers of a Python process."""
_forking = threading.local()
"""`mask`: the signals that the thread blocks, but for a fork."""


def main(arguments: list[str]) -> None:
    """Arguments: the descriptors of the socket, of the arena to read, of the arena to write and of the file for stacks;
    the server's pid; the arena's first size and its growth in bytes."""
    sock, inbox, outbox, stacks, parent, initial, growth = map(int, arguments)
    sys.argv[:] = [""]  # as in Triton: models parse it
    for descriptor in (sock, inbox, outbox, stacks):
        os.set_inheritable(descriptor, False)
    faulthandler.enable(stacks)
    _leave_signals_to_the_server()
    _die_with(parent)
    connection = Connection(
        socket.socket(fileno=sock), ReceiveArena(inbox), SendArena(outbox, initial=initial, growth=growth)
    )
    connection.send("hello")
    first = connection.next_work()
    try:
        if first.kind == "auto_complete":
            _auto_complete(connection, first)
            return
        executor = _load(connection, first)
    except BaseException as error:  # sys.exit() in a model's file, too
        if connection.forked:
            raise
        connection.send("failed", public_text(error) + clean(place(error)), clean(traceback.format_exc()))
        return
    gc.collect()
    gc.freeze()  # what the imports have left behind is not looked through again while requests wait
    _serve(connection, executor)


def _leave_signals_to_the_server() -> None:
    """A signal that ends the server may reach all its processes at once, as systemd's does. The server drains then, and
    tells this one when to end. Handlers, because a program that the model starts would inherit SIG_IGN."""
    for number in _USUAL:
        signal.signal(number, _ignored)
        signal.siginterrupt(number, False)
    os.register_at_fork(before=_block_signals, after_in_parent=_unblock_signals, after_in_child=_restore_signals)


def _block_signals() -> None:
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _USUAL)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _restore_signals() -> None:
    """In a process that the model has forked, which the model may end by a signal at once, as multiprocessing does."""
    for number, usual in _USUAL.items():
        if signal.getsignal(number) is _ignored:
            signal.signal(number, usual)
    _unblock_signals()


def _ignored(number: int, frame: FrameType | None) -> None:
    """Only the server ends this process."""


def _die_with(parent: int) -> None:
    """The kernel ends this process with the server, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def _load(connection: Connection, message: Message) -> Executor:
    options: dict[str, Any] = message.fields[0]
    host.current.append(host.Host(connection))
    model = load(options["program"], options["version_folder"])()
    if not hasattr(model, "execute"):
        raise MisusedError(f"Python model {options['file']} does not implement `execute` method.")
    if hasattr(model, "initialize"):
        model.initialize(options["args"])
    if hasattr(model, "is_ready"):
        ReadyProbe(connection, model)
    connection.send("ready", hasattr(model, "is_ready"))
    return Executor(connection, model, options)


def _auto_complete(connection: Connection, message: Message) -> None:
    options: dict[str, Any] = message.fields[0]
    model = load(options["program"], options["version_folder"])
    connection.send("imported")
    config = ModelConfig(options["config"])
    if not hasattr(model, "auto_complete_config"):
        connection.send("completed", None)
        return
    config = model.auto_complete_config(config)
    if not isinstance(config, ModelConfig):
        raise MisusedError(
            f"auto_complete_config function in model '{options['name']}' must return a valid pb.ModelConfig object."
        )
    connection.send("completed", config.as_dict())


def _serve(connection: Connection, executor: Executor) -> None:
    while True:
        message = connection.next_work()
        if message.kind == "finalize":
            break
        executor.run(message)
        del message
    try:
        executor.stop()
    except BaseException as error:
        if connection.forked:
            raise
        report(error)
