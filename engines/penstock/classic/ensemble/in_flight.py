"""Which requests run, so that models can outlive those that were accepted before them."""

from __future__ import annotations

import asyncio


class InFlight:
    """Requests in the order of their beginning: `settled` waits for those that have begun, and for no later ones."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Event, None] = {}

    def __len__(self) -> int:
        return len(self._running)

    def begin(self) -> asyncio.Event:
        """To be given to `end`."""
        ended = asyncio.Event()
        self._running[ended] = None
        return ended

    def end(self, request: asyncio.Event) -> None:
        del self._running[request]
        request.set()

    async def settled(self) -> None:
        for request in list(self._running):
            await request.wait()
