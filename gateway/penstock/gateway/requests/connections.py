"""All connections of a port, and how one more finds room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Protocol


class PortConnection(Protocol):
    @property
    def replaceable(self) -> bool:
        """Nothing runs on it and nothing waits for its client. One that is being closed is not: it stays among the
        connections until the loop's next turn, and makes room for one other only."""

    @property
    def idle_since(self) -> float: ...

    def abort(self) -> None: ...
    def shutdown(self) -> None:
        """What runs may end; nothing new begins."""


class PortConnections:
    def __init__(self, most: int, connections: set[PortConnection] | None = None) -> None:
        """`connections` is a set that others look at, too."""
        self._most = most
        self._all: set[PortConnection] = set() if connections is None else connections
        self._changed = asyncio.Event()
        self.stopping = False
        """No requests are taken; connections that were still in their TLS handshake are closed when they are made."""

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[PortConnection]:
        """Of those that are there now."""
        return iter(tuple(self._all))

    def add(self, new: PortConnection) -> bool:
        """False: there are too many, and none of the others is idle. Else the one that has been idle longest may have
        been closed, so that idle clients cannot keep out others. One that is there already has its room."""
        if new in self._all:
            return True
        self._all.add(new)
        if len(self._all) <= self._most:
            return True
        candidates = (other for other in self._all if other is not new and other.replaceable)
        idle = min(candidates, key=lambda other: other.idle_since, default=None)
        if idle is not None:
            idle.abort()
        return idle is not None

    def replace(self, old: PortConnection, new: PortConnection) -> None:
        """Another protocol has taken over the same socket."""
        self._all.discard(old)
        self._all.add(new)

    def remove(self, connection: PortConnection) -> None:
        """It has ended."""
        self._all.discard(connection)
        self.note()

    def note(self) -> None:
        """One has changed: `until` looks again."""
        self._changed.set()

    def refuse(self) -> None:
        """No new requests; those that run may end. Idempotent."""
        self.stopping = True
        for connection in self:
            connection.shutdown()

    async def stop(self, seconds: float) -> None:
        """No new requests; those that run may take so long."""
        self.refuse()
        try:
            async with asyncio.timeout(seconds):
                await self.until(lambda: not self._all)
        except TimeoutError:
            for connection in self:
                connection.abort()
            await self.until(lambda: not self._all)

    async def until(self, done: Callable[[], bool]) -> None:
        while not done():
            self._changed.clear()
            await self._changed.wait()
