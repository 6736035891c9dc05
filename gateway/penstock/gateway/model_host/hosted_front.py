"""One front as the host sees it: its connection, its requests, and what it knows."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.classic.python.arena_files import ArenaFiles
from penstock.gateway.model_host.connection import Connection
from penstock.gateway.model_host.hosted_calls import HostedCalls
from penstock.gateway.model_host.messages import (
    Cancel,
    Described,
    Infer,
    Known,
    Published,
    Taken,
    Traced,
    UpMessage,
    decode_up,
)
from penstock.gateway.model_host.publication import Sources


class Host(Protocol):
    """What a front tells when it comes and goes."""

    def joined(self, front: HostedFront) -> Sequence[Described | Published]:
        """Returns what it is to know."""
        ...

    def left(self, front: HostedFront) -> None: ...


class HostedFront:
    def __init__(self, host: Host, sources: Sources, files: ArenaFiles) -> None:
        self._host = host
        self._tracing = sources.tracing
        self._connection: Connection[UpMessage] = Connection(files.up, files.down, decode_up, self._heard, self._lost)
        self._calls = HostedCalls(sources.models, self._connection)
        self._known = 0
        self._regions: list[str] = []
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    async def open(self, sock: socket.socket) -> None:
        await self._connection.open(sock)
        self.tell(self._host.joined(self))

    @property
    def requests(self) -> int:
        """In flight."""
        return len(self._calls)

    def tell(self, messages: Sequence[Described | Published]) -> None:
        for message in messages:
            self._connection.send(message)

    def knows(self, generation: int) -> asyncio.Future[None]:
        """Done when the front answers by this generation, or has gone."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._known >= generation or self._connection.closed:
            future.set_result(None)
        else:
            self._waiting.append((generation, future))
        return future

    def may_use(self, region: str, since: int) -> bool:
        """A region of shared memory that is unregistered since this generation."""
        return self._known < since or region in self._regions

    def close(self) -> None:
        self._connection.close()

    def _lost(self) -> None:
        self._host.left(self)
        self._calls.close()
        self._settle(lambda generation: True)

    def _heard(self, message: UpMessage, tail: memoryview) -> None:
        """Raises ValueError, LookupError and TypeError for a message that no front sends."""
        if isinstance(message, Infer):
            self._calls.infer(message, tail)
        elif isinstance(message, Cancel):
            self._calls.cancel(message.number)
        elif isinstance(message, Taken):
            self._calls.taken(message)
        elif isinstance(message, Known):
            self._known, self._regions = message.generation, message.regions
            self._settle(lambda generation: generation <= self._known)
        elif isinstance(message, Traced):
            self._tracing.keep(message.model, message.traces)

    def _settle(self, settled: Callable[[int], bool]) -> None:
        for generation, future in self._waiting:
            if settled(generation) and not future.done():
                future.set_result(None)
        self._waiting = [each for each in self._waiting if not each[1].done()]
