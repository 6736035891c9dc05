"""The model host: runs requests of front processes to the classic models of this one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from pathlib import Path

from penstock.gateway.model_host.hosted_front import HostedFront
from penstock.gateway.model_host.messages import Described, Published
from penstock.gateway.model_host.publication import Publication, Sources
from penstock.gateway.model_host.socket_file import accept, listen

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
        self._leaving: dict[str, int] = {}
        """Unregistered regions of shared memory, with the generation that has told fronts."""
        sources.regions.used_elsewhere = self._uses_region
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
            generation = self._publication.generation
            self._leaving = {name: self._leaving.get(name, generation) for name in self._publication.leaving}
            for front in self._fronts:
                front.tell(messages)

    def _uses_region(self, name: str) -> bool:
        """Whether a front may use an unregistered region: one that has not heard of it yet may."""
        since = self._leaving.get(name, self._publication.generation + 1)
        return any(front.may_use(name, since) for front in self._fronts)

    async def spread(self) -> None:
        """Publishes, and returns when every front knows. Does not wait without end for one that does not answer. What
        they say of the regions that are unregistered may have to be published, too."""
        for _ in range(2):
            self.publish()
            await self._all_know()

    async def _all_know(self) -> None:
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
