"""What the operator tells the process."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

logger = logging.getLogger("penstock")


class ServerSignals:
    """SIGTERM and SIGINT end the server, a second one at once. SIGHUP reads files again."""

    def __init__(self) -> None:
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
        terminal that is closed should."""
        if not self._reloads:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._hung_up)
        self._reloads.append(reload)

    def _hung_up(self) -> None:
        logger.info("SIGHUP: files are read again")
        for reload in self._reloads:
            reload()
