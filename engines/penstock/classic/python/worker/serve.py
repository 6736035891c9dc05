"""The life of a model's process: connect, load, execute, finalize."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import socket
import sys
import threading
import traceback
from types import FrameType
from typing import Any

from . import host
from .arena import ReceiveArena, SendArena
from .arguments import clean
from .connection import Connection, Message
from .errors import MisusedError, public_text, report
from .executor import Executor
from .health import Health
from .loader import load, place
from .model_config import ModelConfig

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
        Health(connection, model)
    connection.send("ready", hasattr(model, "is_ready"))
    return Executor(connection, model, options)


def _auto_complete(connection: Connection, message: Message) -> None:
    options: dict[str, Any] = message.fields[0]
    found = load(options["program"], options["version_folder"])
    connection.send("imported")
    config = ModelConfig(options["config"])
    if not hasattr(found, "auto_complete_config"):
        connection.send("completed", None)
        return
    config = found.auto_complete_config(config)
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
