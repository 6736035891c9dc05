"""Both halves of the model host's border in one process: a host over the models of a test, and fronts of it."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.gateway.kserve.context import KServe
from penstock.gateway.model_host.host import ModelHost
from penstock.gateway.model_host.host_link import HostLink
from penstock.gateway.model_host.publication import Sources


@dataclass
class Hosted:
    host: ModelHost
    links: list[HostLink]
    fronts: list[KServe]
    """What the KServe handlers of each front take."""
    path: Path


@asynccontextmanager
async def hosted(owner: KServe, fronts: int = 1) -> AsyncIterator[Hosted]:
    """So many fronts of what `owner` serves."""
    async with AsyncExitStack() as ending:
        path = Path(ending.enter_context(tempfile.TemporaryDirectory())) / "models"
        host = ModelHost(Sources(owner.models, owner.shared_memory, owner.tracing, owner.logs))
        host.start(path)
        ending.push_async_callback(host.stop)
        links = []
        for _ in range(fronts):
            links.append(await HostLink.open(path, owner.logs, allow_client_shm=owner.shared_memory.allowed))
            ending.callback(links[-1].close)
        yield Hosted(host, links, [front_of(owner, link) for link in links], path)


def front_of(owner: KServe, link: HostLink) -> KServe:
    return replace(
        owner,
        models=link.models,
        shared_memory=link.shared_memory,
        tracing=link.tracing,
        elsewhere=link.control,
    )
