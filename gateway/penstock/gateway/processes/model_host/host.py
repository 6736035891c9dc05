"""The model host: runs requests of front processes to the classic models of this one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from penstock.gateway.processes.model_host.connection import HostConnection
from penstock.gateway.processes.model_host.hosted_calls import HostedCalls
from penstock.gateway.processes.model_host.messages import (
    Cancel,
    Described,
    Infer,
    Known,
    Published,
    Taken,
    Traced,
    UpMessage,
)
from penstock.gateway.processes.model_host.publication import Publication, Sources

logger = logging.getLogger(__name__)


class HostedFront:
    """One front as the host sees it: its connection, its requests, and what it knows."""

    def __init__(self, sources: Sources, connection: HostConnection, left: Callable[[HostedFront], None]) -> None:
        self._connection = connection
        self._tracing = sources.tracing
        self._left = left
        self._calls = HostedCalls(sources.models, connection)
        self._known = 0
        self._regions: list[str] = []
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

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

    def heard(self, message: UpMessage, tail: memoryview) -> None:
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

    def lost(self) -> None:
        """The front has gone."""
        self._left(self)
        self._calls.close()
        self._settle(lambda generation: True)

    def close(self) -> None:
        self._connection.close()

    def _settle(self, settled: Callable[[int], bool]) -> None:
        for generation, future in self._waiting:
            if settled(generation) and not future.done():
                future.set_result(None)
        self._waiting = [entry for entry in self._waiting if not entry[1].done()]


_LOOK_SECONDS = 0.25
"""Between looks for changes that nobody tells of: an instance that is being restarted, a model that was loaded."""
_SPREAD_SECONDS = 5.0
"""That a change waits for a front that does not answer."""


class ModelHost:
    """Lives on the event loop of the process that owns the models."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._publication = Publication(sources)
        self._fronts: set[HostedFront] = set()
        self._leaving: dict[str, int] = {}
        """Unregistered regions of shared memory, with the generation that has told fronts."""
        sources.regions.used_elsewhere = self._uses_region
        self._looking: asyncio.TimerHandle | None = None

    def join(self, connection: HostConnection) -> HostedFront:
        """One more front, at the other end of this connection: it is told what there is. The messages that come are
        for its `heard`, the end for its `lost`."""
        front = HostedFront(self._sources, connection, self._fronts.discard)
        self.publish()
        self._fronts.add(front)
        front.tell(self._publication.whole())
        if self._looking is None:
            self._looking = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)
        return front

    def stop(self) -> None:
        """Ends the connections of all fronts, and with them their requests. Idempotent."""
        if self._looking is not None:
            self._looking.cancel()
        for front in list(self._fronts):
            front.close()

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

    def _look(self) -> None:
        self._looking = None
        if self._fronts:
            self.publish()
            self._looking = asyncio.get_running_loop().call_later(_LOOK_SECONDS, self._look)
