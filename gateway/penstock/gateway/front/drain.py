"""Whether the server accepts work, and what is still in flight.

accepting ──leave()──► leaving ──begin()──► draining ──expire()──► expired

From `leave` on, readiness is 503, so that balancers send new work elsewhere, and connections are asked to end; requests
that still come are served. While draining, new work is refused with 503 and Retry-After, and calls in flight continue.
At expiry the remaining calls are interrupted: a stream ends with an error event, any other answer becomes a 503.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from penstock.engines.errors import NotReadyError


class Interruptible(Protocol):
    def interrupt(self, error: NotReadyError) -> None: ...


class DrainState:
    def __init__(self, retry_after: float = 5.0) -> None:
        self.retry_after = retry_after
        """Seconds told to refused clients: about the time until another server takes over."""
        self._leaving = False
        self._draining = False
        self._calls: set[Interruptible] = set()
        self._elsewhere: set[Interruptible] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def leaving(self) -> bool:
        """Not ready any more: it is about to drain, or is draining."""
        return self._leaving

    @property
    def draining(self) -> bool:
        """New work is refused."""
        return self._draining

    @property
    def in_flight(self) -> int:
        """Calls that were admitted and have not ended."""
        return len(self._calls)

    def leave(self) -> None:
        """Tells balancers to send new work elsewhere, and serves what still comes. Idempotent."""
        self._leaving = True

    def begin(self) -> None:
        """Refuses new work from now on. Idempotent; implies `leave`."""
        self._leaving = self._draining = True

    def expire(self) -> None:
        """Ends what is still in flight. Idempotent; implies `begin`."""
        self.begin()
        for call in (*self._calls, *self._elsewhere):
            call.interrupt(self._shutting_down())

    def admit(self, call: Interruptible) -> None:
        """Counts a call in. Raises NotReadyError while draining."""
        if self._draining:
            raise self._shutting_down()
        self._calls.add(call)
        self._idle.clear()

    def release(self, call: Interruptible) -> None:
        self._calls.discard(call)
        self._look()

    def wait_for(self, process: Interruptible) -> None:
        """Another process of the server drains, too: this one counts as busy until `wait_no_more`."""
        self._elsewhere.add(process)
        self._idle.clear()

    def wait_no_more(self, process: Interruptible) -> None:
        """Idempotent."""
        self._elsewhere.discard(process)
        self._look()

    def _look(self) -> None:
        if not self._calls and not self._elsewhere:
            self._idle.set()

    async def wait_idle(self, seconds: float | None = None) -> bool:
        """True once nothing is in flight, False when that many seconds passed before."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def _shutting_down(self) -> NotReadyError:
        return NotReadyError("The server is shutting down.", retry_after=self.retry_after)
