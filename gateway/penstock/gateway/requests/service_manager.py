"""Messages to a service manager: that the server is ready, what it loads, that it stops, and that it is not stuck.

systemd's protocol, which Podman speaks, too: https://www.freedesktop.org/software/systemd/man/sd_notify.html. Messages
are datagrams of NAME=VALUE lines for the socket in NOTIFY_SOCKET.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager

from penstock.engines.contract.loading import Loading
from penstock.gateway.requests.loading_board import LoadingView

logger = logging.getLogger("penstock")

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""Of the environment. Not for the processes that this one starts."""
_SEND_SECONDS = 1.0
"""The most that a manager which does not read may hold up the event loop."""


class ServiceManager:
    """Lives on the event loop. Where no manager listens, every call does nothing."""

    def __init__(self, address: str = "", watchdog_seconds: float = 0.0) -> None:
        """`address`: a path, or @ and a name in the abstract namespace; "": there is no manager. `watchdog_seconds`:
        after so long without a sign of life the manager ends the process; 0: never."""
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._watchdog_seconds = watchdog_seconds
        self._ready = False
        self._status = "starting"
        """While nothing is loaded."""
        self._next_sign: asyncio.TimerHandle | None = None

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str] = os.environ) -> ServiceManager:
        """Takes the variables out of the environment."""
        address, microseconds, pid = (environ.pop(name, "") for name in VARIABLES)
        if not address.startswith(("/", "@")):
            if address:
                logger.warning("NOTIFY_SOCKET=%s is not the path of a socket: it is not used", address)
            return cls()
        ours = pid in ("", str(os.getpid()))
        return cls(address, int(microseconds) / 1e6 if ours and microseconds.isdecimal() else 0.0)

    @property
    def listens(self) -> bool:
        return bool(self._address)

    def watching(self, view: LoadingView) -> LoadingView:
        """`view`, and the manager told of the same."""
        return _LoadingStatus(self, view) if self.listens else view

    def show(self, status: str = "") -> None:
        """For people who ask the manager, until the next one; "": what it was before anything was loaded."""
        self._say(f"STATUS={status or self._status}")

    def ready(self, status: str) -> None:
        self._ready, self._status = True, status
        self._say("READY=1", f"STATUS={status}")

    def stopping(self, status: str, seconds: float) -> None:
        """`seconds`: how long it may take, whatever the manager's own limit is."""
        self._ready, self._status = False, status
        self._say("STOPPING=1", f"STATUS={status}", f"EXTEND_TIMEOUT_USEC={int(seconds * 1e6)}")

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """While files are read again. A server that is not ready yet must not say so at the end."""
        if not self._ready:
            yield
            return
        self._say("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            yield
        finally:
            self._say("READY=1", f"STATUS={self._status}")

    def start_watchdog(self, live: Callable[[], bool]) -> None:
        """Gives signs of life, twice as often as they are needed. They stop when the event loop is stuck; where `live`
        says that only a new process can help, the manager is told at once."""
        if self._watchdog_seconds:
            self._sign(live)

    def _sign(self, live: Callable[[], bool]) -> None:
        if live():
            self._say("WATCHDOG=1")
        else:
            self._say("WATCHDOG=trigger", "STATUS=no model can answer any more")
        loop = asyncio.get_running_loop()
        self._next_sign = loop.call_later(self._watchdog_seconds / 2, self._sign, live)

    def close(self) -> None:
        if self._next_sign is not None:
            self._next_sign.cancel()

    def _say(self, *lines: str) -> None:
        if not self.listens:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(_SEND_SECONDS)
                sender.sendto("\n".join(lines).encode(), self._address)
        except OSError as error:
            logger.warning("the service manager could not be notified (%s): %s", lines[0], error)


class _LoadingStatus:
    """A LoadingView that tells the manager before it shows."""

    def __init__(self, manager: ServiceManager, view: LoadingView) -> None:
        self._manager = manager
        self._view = view

    def show(self, name: str, loading: Loading, seconds: float) -> None:
        self._manager.show(f"loading {name}: {loading}")
        self._view.show(name, loading, seconds)

    def clear(self) -> None:
        self._manager.show()
        self._view.clear()
