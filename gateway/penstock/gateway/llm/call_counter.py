"""How many calls still use a model or an adapter that is to be unloaded."""

from __future__ import annotations

import asyncio
import time


class CallCounter:
    """Counts the calls that a model or an adapter serves."""

    def __init__(self) -> None:
        self._calls = 0
        self._holds = 0
        self._idle = asyncio.Event()
        self.idle_since = time.monotonic()
        """When the newest call ended, here or in a process that held it."""

    @property
    def calls(self) -> int:
        return self._calls

    def begin(self) -> None:
        """A call is being served."""
        self._calls += 1
        self._idle.clear()

    def end(self) -> None:
        self._calls -= 1
        if not self._calls:
            self.idle_since = time.monotonic()
            self._look()

    def hold(self) -> None:
        """Another process may serve calls: it tells when it no longer does."""
        self._holds += 1
        self._idle.clear()

    @property
    def held(self) -> bool:
        return self._holds > 0

    def release(self) -> None:
        self._holds -= 1
        self.idle_since = time.monotonic()
        self._look()

    def _look(self) -> None:
        if not self._calls and not self._holds:
            self._idle.set()

    def __enter__(self) -> None:
        self.begin()

    def __exit__(self, *exc: object) -> None:
        self.end()

    async def wait_idle(self) -> None:
        """Returns when no call is being served, here or in a process that holds it."""
        if self._calls or self._holds:
            await self._idle.wait()
