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
from typing import Any, NoReturn, TextIO

_NUMBER = struct.Struct("i")
_MOST_BYTES = 1 << 20


class ForkedProcess:
    """`penstock` with these arguments, in this environment. It has what tests use of `subprocess.Popen`."""

    def __init__(self, arguments: list[str], environ: dict[str, str]) -> None:
        self.returncode: int | None = None
        reading, writing = os.pipe()
        self._reports, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = json.dumps({"arguments": arguments, "environ": environ, "folder": os.getcwd()}).encode()
        socket.send_fds(_forker()[0], [order], [theirs.fileno(), writing])
        theirs.close()
        os.close(writing)
        self.stderr: TextIO = os.fdopen(reading)
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
        order, descriptors, *_ = socket.recv_fds(orders, _MOST_BYTES, 2)
        if not order:
            return
        if not os.fork():
            orders.close()
            _run(json.loads(order), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _run(order: dict[str, Any], reports: int, stderr: int) -> NoReturn:
    """Waits for the server, as its parent must: the process that forks has no time."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if not pid:
        os.close(reports)
        os.dup2(stderr, sys.stderr.fileno())
        os.close(stderr)
        _serve(order)
    os.close(stderr)
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
