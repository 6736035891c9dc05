"""Copies of large tensors into shared memory, kept away from the event loop."""

from __future__ import annotations

import asyncio

from penstock.classic.python.worker.arena import SendArena, fill
from penstock.classic.python.worker.wire import Array, Buffer

_AT_ONCE = 1024 * 1024
"""Bytes that are copied on the loop itself, in some tenths of a millisecond; more goes to a thread."""


class Copies:
    """A Packer's store: blocks are reserved while a message is packed, and filled before it is sent."""

    def __init__(self, arena: SendArena) -> None:
        self._arena = arena
        self._waiting: list[tuple[Array, Buffer]] = []
        self._size = 0

    def put(self, data: Buffer, size: int) -> tuple[int, int]:
        segment, offset, target = self._arena.reserve(size)
        self._waiting.append((target, data))
        self._size += size
        return segment, offset

    @property
    def pending(self) -> bool:
        return bool(self._waiting)

    @property
    def are_long(self) -> bool:
        """Made on the loop, they would hold it up."""
        return self._size > _AT_ONCE

    async def made(self) -> None:
        if self.are_long:
            await asyncio.to_thread(self.make)
        else:
            self.make()

    def make(self) -> None:
        for target, data in self._waiting:
            fill(target, data)
        self._waiting.clear()
