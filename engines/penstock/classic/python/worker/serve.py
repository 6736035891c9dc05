"""The life of a model's process: connect, load, execute, finalize."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import socket
import traceback
from typing import Any

from . import host
from .arena import ReceiveArena, SendArena
from .arguments import clean
from .connection import Connection, Message
from .errors import MisusedError, public_text
from .executor import Executor
from .health import Health
from .loader import load, place
from .model_config import ModelConfig

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Arguments: the descriptors of the socket, of the arena to read, of the arena to write and of the file for stacks;
    the server's pid; the arena's first size and its growth in bytes."""
    sock, inbox, outbox, stacks, parent, initial, growth = map(int, arguments)
    os.set_inheritable(stacks, False)
    faulthandler.enable(stacks)
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
        connection.send("failed", public_text(error) + place(error), clean(traceback.format_exc()))
        return
    gc.collect()
    gc.freeze()  # what the imports have left behind is not looked through again while requests wait
    _serve(connection, executor)


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
    except Exception:
        traceback.print_exc()
