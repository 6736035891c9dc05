"""The signals by which the operator ends the server, or has files read again."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from penstock.gateway.requests.service_manager import ServiceManager

logger = logging.getLogger("penstock")


class ServerSignals:
    """SIGTERM and SIGINT end the server, a second one at once. SIGHUP reads files again."""

    def __init__(self, manager: ServiceManager) -> None:
        """`manager` is told while files are read."""
        self._manager = manager
        self.end = asyncio.Event()
        self.hurry = asyncio.Event()
        self.failed = False
        """The server ends because it cannot go on."""
        self._reloads: list[Callable[[], None]] = []

    def handle(self) -> None:
        """From now on."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received, number.name)
        if self._manager.listens:
            loop.add_signal_handler(signal.SIGHUP, self._hung_up)

    def _received(self, name: str) -> None:
        if self.end.is_set():
            logger.warning("%s again: stopping at once", name)
            self.hurry.set()
        self.end.set()

    def fail(self) -> None:
        """As if a signal had come."""
        self.failed = True
        self.end.set()

    def on_hangup(self, reload: Callable[[], None]) -> None:
        """`reload` is called at each SIGHUP. Without anything to reload the signal ends the process, as that of a
        terminal that is closed should; a service manager's, which has no terminal, never does."""
        if not self._reloads:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._hung_up)
        self._reloads.append(reload)

    def _hung_up(self) -> None:
        logger.info("SIGHUP: %s", "files are read again" if self._reloads else "there is nothing to read again")
        with self._manager.reloading():
            for reload in self._reloads:
                reload()
