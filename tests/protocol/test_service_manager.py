"""A server that a service manager runs, as systemd with Type=notify does: what the manager hears of its life."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from support.server import Server


class Manager:
    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "notify")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.address)
        self._socket.settimeout(60)
        self.heard: list[str] = []

    def wait_for(self, line: str) -> None:
        """Hears messages until one has this line."""
        while True:
            lines = self._socket.recv(4096).decode().split("\n")
            self.heard += lines
            if line in lines:
                return

    def close(self) -> None:
        self._socket.close()


@contextmanager
def managed(folder: Path, *flags: str) -> Iterator[tuple[Manager, Server]]:
    manager = Manager(folder)
    environ = {"NOTIFY_SOCKET": manager.address, "WATCHDOG_USEC": "400000"}
    server = Server("--engine", "simulated", *flags, environ=environ)
    try:
        yield manager, server
    finally:
        server.close()
        manager.close()


def test_a_server_s_life(tmp_path: Path) -> None:
    with managed(tmp_path) as (manager, server):
        manager.wait_for("WATCHDOG=1")
        assert "READY=1" not in manager.heard, "ready before anything was loaded"
        manager.wait_for("READY=1")
        assert "NOTIFY_SOCKET" not in psutil.Process(server.engine_pid()).environ()
        manager.wait_for("WATCHDOG=1")
        server.process.send_signal(signal.SIGHUP)  # nothing is there to be read again
        manager.wait_for("RELOADING=1")
        manager.wait_for("READY=1")
        server.process.send_signal(signal.SIGTERM)
        manager.wait_for("STOPPING=1")
        assert "STATUS=draining 0 requests" in manager.heard
        assert server.process.wait(30) == 0
