"""The model host: runs requests of front processes to the classic models of this one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from penstock.classic.python.link import ArenaFiles
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
from penstock.gateway.model_host.publication import Publication, Sources
from penstock.gateway.model_host.socket_file import accept, listen


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
            self._known = message.generation
            self._settle(lambda generation: generation <= self._known)
        elif isinstance(message, Traced):
            self._tracing.keep(message.model, message.traces)

    def _settle(self, settled: Callable[[int], bool]) -> None:
        for generation, future in self._waiting:
            if settled(generation) and not future.done():
                future.set_result(None)
        self._waiting = [each for each in self._waiting if not each[1].done()]


logger = logging.getLogger(__name__)

_LOOK_SECONDS = 0.25
"""Between looks for changes that nobody tells of: an instance that is being restarted, a model that was loaded."""
_SPREAD_SECONDS = 5.0
"""That a change waits for a front that does not answer."""


class ModelHost:
    """From `start` to `stop`, on the event loop of the process that owns the models."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._publication = Publication(sources)
        self._fronts: set[HostedFront] = set()
        self._numbers = 0
        self._loop = asyncio.get_running_loop()
        self._listener: socket.socket | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()

    def start(self, path: Path) -> None:
        """Listens there from now on. Raises EngineError."""
        self._path = path
        self._listener = listener = listen(path)
        self._loop.add_reader(listener.fileno(), self._accept, listener)

    def stop(self) -> None:
        """Ends the connections of all fronts, and with them their requests. Idempotent."""
        if self._listener is None:
            return
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        self._listener = None
        with contextlib.suppress(OSError):
            self._path.unlink()
        if self._looking is not None:
            self._looking.cancel()
        for front in list(self._fronts):
            front.close()
        for task in self._opening:
            task.cancel()

    @property
    def fronts(self) -> int:
        """That are connected."""
        return len(self._fronts)

    @property
    def requests(self) -> int:
        """That they have in flight."""
        return sum(front.requests for front in self._fronts)

    def publish(self) -> None:
        """Something may have changed: fronts are told now."""
        messages = self._publication.look()
        if messages:
            for front in self._fronts:
                front.tell(messages)

    async def spread(self) -> None:
        """Publishes, and returns when every front knows. Does not wait without end for one that does not answer."""
        self.publish()
        generation = self._publication.generation
        waiting = [front.knows(generation) for front in self._fronts]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=_SPREAD_SECONDS)
            for future in late:
                future.cancel()
            if late:
                logger.warning("%d front processes have not heard of a change yet", len(late))

    def _accept(self, listener: socket.socket) -> None:
        while (accepted := accept(listener, self._numbers + 1)) is not None:
            self._numbers += 1
            sock, files = accepted
            front = HostedFront(self, self._sources, files)
            task = self._loop.create_task(front.open(sock))
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)

    def joined(self, front: HostedFront) -> list[Described | Published]:
        """The front is connected. Returns what it is to know."""
        self.publish()
        self._fronts.add(front)
        if self._looking is None:
            self._looking = self._loop.call_later(_LOOK_SECONDS, self._look)
        return self._publication.whole()

    def left(self, front: HostedFront) -> None:
        self._fronts.discard(front)

    def _look(self) -> None:
        self._looking = None
        if self._fronts:
            self.publish()
            self._looking = self._loop.call_later(_LOOK_SECONDS, self._look)
