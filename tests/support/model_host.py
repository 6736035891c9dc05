"""Both halves of the model host's border in one process: a host over the models of a test, and fronts of it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from penstock.classic.base import InferModel
from penstock.classic.messages import InferRequest
from penstock.classic.python.link import ArenaFiles
from penstock.gateway.apis.kserve.context import KServe
from penstock.gateway.apis.kserve.shared_memory import SharedMemoryRegions
from penstock.gateway.apis.kserve.store import IndexEntry, ModelStore
from penstock.gateway.apis.kserve.tracing import Tracing
from penstock.gateway.processes.model_host.connection import HostConnection
from penstock.gateway.processes.model_host.host import ModelHost
from penstock.gateway.processes.model_host.host_link import HostLink
from penstock.gateway.processes.model_host.messages import DownMessage, Published, decode_down, decode_up
from penstock.gateway.processes.model_host.publication import Sources
from penstock.gateway.requests.context import Principal, RequestContext


@dataclass
class Hosted:
    host: ModelHost
    links: list[HostLink]
    connections: list[HostConnection]
    """Of the fronts."""

    async def join(self, regions: SharedMemoryRegions) -> HostLink:
        """One more front."""
        ours, theirs = socket.socketpair()
        files = ArenaFiles("penstock-test")
        down, up = os.dup(files.down), os.dup(files.up)
        near = HostConnection(
            files.up, files.down, decode_up, lambda *heard: hosted.heard(*heard), lambda: hosted.lost()
        )
        await near.open(ours)
        hosted = self.host.join(near)
        knows = asyncio.Event()

        def heard(message: DownMessage, tail: memoryview) -> None:
            link.heard(message, tail)
            if isinstance(message, Published):
                knows.set()

        far = HostConnection(down, up, decode_down, heard, lambda: link.lost())
        first_trace = (len(self.links) << 32) + 1
        link = HostLink(far, first_trace, os.getpid(), allow_client_shm=regions.allowed)
        await far.open(theirs)
        await knows.wait()
        self.links.append(link)
        self.connections.append(far)
        return link


@asynccontextmanager
async def hosting(
    models: Any,
    fronts: int = 1,
    regions: SharedMemoryRegions | None = None,
    tracing: Tracing | None = None,
    **more: Any,
) -> AsyncIterator[Hosted]:
    """A host over this ModelStore and so many fronts of it."""
    regions = regions or SharedMemoryRegions(False)
    async with AsyncExitStack() as ending:
        host = ModelHost(Sources(models, regions, tracing or Tracing(), **more))
        ending.callback(host.stop)
        found = Hosted(host, [], [])
        ending.callback(lambda: [connection.close() for connection in found.connections])
        for _ in range(fronts):
            await found.join(regions)
        yield found


@asynccontextmanager
async def served_from_a_front(owner: KServe) -> AsyncIterator[KServe]:
    """What the KServe handlers of a front take. A front passes on to the owner what it does not answer itself; here
    the owner's parts are asked."""
    async with hosting(owner.models, 1, owner.shared_memory, owner.tracing, serves=lambda model: True) as hosted:
        [link] = hosted.links
        yield replace(
            owner,
            models=_FrontStore(owner.models, link),
            shared_memory=_FrontRegions(owner.shared_memory, link.shared_memory),
            tracing=_FrontTracing(owner.tracing, link.tracing),
            spread=hosted.host.spread,
        )


class _FrontStore:
    """Requests go to the host; descriptions, the index and changes of models are the owner's."""

    def __init__(self, owner: ModelStore, link: HostLink) -> None:
        self._owner = owner
        self._link = link

    def model(self, name: str, version: str = "", request: InferRequest | None = None) -> InferModel:
        found = self._owner.model(name, version, request)
        if request is None:
            return found
        remote = self._link.models.find(name, version)
        assert remote is not None
        return remote

    def versions(self, name: str) -> list[int]:
        return self._owner.versions(name)

    def models(self) -> Iterable[InferModel]:
        return self._owner.models()

    def index(self, *, ready: bool) -> list[IndexEntry]:
        return self._owner.index(ready=ready)

    async def load(self, name: str, *, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        await self._owner.load(name, config=config, files=files)

    async def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        await self._owner.unload(name, unload_dependents=unload_dependents)

    @property
    def ready(self) -> bool:
        return self._owner.ready


class _FrontRegions(SharedMemoryRegions):
    """Tensors are read and written through the front's regions."""

    def __init__(self, owner: SharedMemoryRegions, front: SharedMemoryRegions) -> None:
        super().__init__(owner.allowed)
        self._owner = owner
        self._front = front

    def of(
        self, caller: Principal, hold: Callable[[int], None] | None = None, request: RequestContext | None = None
    ) -> SharedMemoryRegions:
        return _FrontRegions(self._owner.of(caller), self._front.of(caller, hold))

    def __getattribute__(self, name: str) -> Any:
        if name in ("register", "unregister", "status", "cuda_status", "register_cuda", "unregister_cuda"):
            return getattr(self._owner, name)
        return getattr(self._front, name) if name == "slice" else super().__getattribute__(name)


class _FrontTracing(Tracing):
    """Requests are traced by the front."""

    def __init__(self, owner: Tracing, front: Tracing) -> None:
        self._owner = owner
        self._front = front

    def __getattribute__(self, name: str) -> Any:
        if name in ("settings", "update"):
            return getattr(self._owner, name)
        return getattr(self._front, name) if name in ("start", "active") else super().__getattribute__(name)
