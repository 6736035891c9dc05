"""Processes of `penstock`, forked from one that has imported it: importing takes a server longer than the rest of its
start, and tests start hundreds."""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Thread
from types import MappingProxyType
from typing import Any, NoReturn, TextIO

_NUMBER = struct.Struct("i")
_MOST_BYTES = 1 << 20


class ForkedProcess:
    """`penstock` with these arguments, in this environment. It has what tests use of `subprocess.Popen`. `stdout`: in a
    pipe, as `stderr`. `streams`: of its standard streams, by number, those that are descriptors of the caller."""

    def __init__(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str] = os.environ,
        *,
        stdout: bool = False,
        streams: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.args = arguments
        self.returncode: int | None = None
        self._reports, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        reading, writing = zip(*[os.pipe() for _ in range(2 if stdout else 1)], strict=True)
        outputs = {**dict(zip((2, 1), writing, strict=False)), **streams}
        order = {"arguments": arguments, "environ": dict(environ), "folder": os.getcwd(), "streams": [*outputs]}
        socket.send_fds(_forker()[0], [json.dumps(order).encode()], [theirs.fileno(), *outputs.values()])
        theirs.close()
        for descriptor in writing:
            os.close(descriptor)
        self.stderr, *out = map(os.fdopen, reading)
        self.stdout: TextIO | None = out[0] if out else None
        self.pid = self._reported()

    def _reported(self) -> int:
        report = self._reports.recv(_NUMBER.size)
        return int(_NUMBER.unpack(report)[0])

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._reports.settimeout(timeout)
            try:
                self.returncode = os.waitstatus_to_exitcode(self._reported())
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(f"penstock, process {self.pid}", timeout or 0) from None
            self._reports.close()
        return self.returncode

    def communicate(self, timeout: float) -> tuple[str, str]:
        """All that it writes, once it has ended. Raises subprocess.TimeoutExpired."""
        written: dict[int, str] = {}
        pipes = dict(enumerate(filter(None, (self.stderr, self.stdout))))
        readers = [Thread(target=lambda n=n: written.update({n: pipes[n].read()}), daemon=True) for n in pipes]
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        return written.get(1, ""), written[0]

    def poll(self) -> int | None:
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextmanager
def filled_pipe(text: str) -> Iterator[int]:
    """The end to read from, of a pipe that has room for the text."""
    reading, writing = os.pipe()
    os.write(writing, text.encode())
    os.close(writing)
    yield reading
    os.close(reading)


def completed(
    *arguments: str, environ: Mapping[str, str] = os.environ, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """As `subprocess.run` gives it; `stdin` is what a pipe holds. Raises subprocess.TimeoutExpired after 100 s, when it
    has been killed."""
    with filled_pipe(stdin) as text:
        process = ForkedProcess(arguments, environ, stdout=True, streams={0: text})
    try:
        out, errors = process.communicate(100)
    finally:
        process.kill()
    return subprocess.CompletedProcess(arguments, process.wait(), out, errors)


@functools.cache
def _forker() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """The process that forks, and where its orders go. It ends when this one does."""
    orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen([sys.executable, "-P", __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    theirs.close()
    return orders, process


def _fork_on_order(orders: socket.socket) -> None:
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"  # as `penstock serve` does before it imports gRPC
    importlib.import_module("penstock.gateway.server.lifecycle")
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody has to wait for those that wait
    while True:
        order, descriptors, *_ = socket.recv_fds(orders, _MOST_BYTES, 4)
        if not order:
            return
        if not os.fork():
            orders.close()
            _run(json.loads(order), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _run(order: dict[str, Any], reports: int, *streams: int) -> NoReturn:
    """Waits for the server, as its parent must: the process that forks has no time."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if not pid:
        os.close(reports)
        for descriptor, number in zip(streams, order["streams"], strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        _serve(order)
    for descriptor in streams:
        os.close(descriptor)
    os.write(reports, _NUMBER.pack(pid))
    status = os.waitpid(pid, 0)[1]
    os.write(reports, _NUMBER.pack(status))
    os._exit(0)


def _serve(order: dict[str, Any]) -> NoReturn:
    from penstock.gateway.cli import main

    random.seed()
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environ"])
    sys.argv = ["penstock", *order["arguments"]]
    sys.exit(main())


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as orders:
        _fork_on_order(orders)
