"""How many model versions are worked on at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

_held: ContextVar[bool] = ContextVar("holds_load_slot", default=False)


class LoadSlots:
    def __init__(self, count: int) -> None:
        self._free = asyncio.Semaphore(count)

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """For the block, waiting for its turn."""
        async with self._free:
            token = _held.set(True)
            try:
                yield
            finally:
                _held.reset(token)

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[None]:
        """Another one may have the current task's slot for the block, if it has one: it waits for what others do."""
        if not _held.get():
            yield
            return
        self._free.release()
        try:
            yield
        finally:
            await self._free.acquire()
