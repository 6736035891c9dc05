"""Code of a test inside of a server's processes, and the socket by which the test commands it.

The test writes a `sitecustomize` for the server's environment, which imports a module of the test in each process. That
module answers one-letter commands with JSON: `answer_commands`.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

VARIABLE = "INSIDE_SOCKET"
"""Not one of PENSTOCK_...: the server knows all of those."""


class Inside:
    """The test's side. `environ` is for the server; `command` asks all processes that live."""

    def __init__(self, folder: Path, module: Path, **variables: str) -> None:
        """`module` is a file that calls `answer_commands` when it is imported."""
        self._connections: list[socket.socket] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(folder / "commands"))
        self._listener.listen(64)
        self._listener.setblocking(False)
        tests = Path(__file__).parents[1]
        is_ours = module.parent == tests / "support"  # by the package's name: modules in it are called `grpc`, too
        name, paths = (f"support.{module.stem}", []) if is_ours else (module.stem, [str(module.parent)])
        startup = f"import sys\nsys.path[:0] = {[*paths, str(tests)]}\nimport {name}\n"
        (folder / "sitecustomize.py").write_text(startup)
        self.environ = {"PYTHONPATH": str(folder), VARIABLE: str(folder / "commands"), **variables}

    def __enter__(self) -> Inside:
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._listener, *self._connections):
            one.close()

    def command(self, letter: bytes) -> list[Any]:
        """The answers of all processes. One that has ended is left out."""
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._listener, selectors.EVENT_READ)
            while waiting.select(0):
                self._connections.append(self._listener.accept()[0])
        answers = []
        for connection in list(self._connections):
            line = self._asked(connection, letter)
            if line:
                answers.append(json.loads(line))
            else:
                self._connections.remove(connection)
        return answers

    @staticmethod
    def _asked(connection: socket.socket, letter: bytes) -> bytes:
        connection.setblocking(True)
        try:
            connection.sendall(letter)
            with connection.makefile("rb") as reader:
                return reader.readline()
        except OSError:
            return b""


def answer_commands(commands: Mapping[bytes, Callable[[], Any]]) -> None:
    """In a process of the server: answers in a thread, and in each process that this one forks."""

    def serve() -> None:
        with socket.socket(socket.AF_UNIX) as control:
            control.connect(os.environ[VARIABLE])
            while letter := control.recv(1):
                control.sendall(json.dumps(commands[letter]()).encode() + b"\n")

    def start() -> None:
        threading.Thread(target=serve, daemon=True).start()

    os.register_at_fork(after_in_child=start)
    start()
