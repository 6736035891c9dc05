"""One front as the host sees it: its connection, its requests, its questions."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from penstock.classic.python.arena_files import ArenaFiles
from penstock.gateway.front.context import Principal, Role
from penstock.gateway.model_host.connection import Connection
from penstock.gateway.model_host.error_fields import to_fields
from penstock.gateway.model_host.hosted_calls import HostedCalls
from penstock.gateway.model_host.messages import (
    Ask,
    Cancel,
    Described,
    Infer,
    Known,
    Published,
    Reply,
    Taken,
    Traced,
    UpMessage,
    decode_up,
)
from penstock.gateway.model_host.publication import Sources
from penstock.gateway.model_host.statistics_fields import to_fields as statistics_fields


class Host(Protocol):
    """What a front changes for all of them."""

    def joined(self, front: HostedFront) -> Sequence[Described | Published]: ...
    def left(self, front: HostedFront) -> None: ...
    def publish(self) -> None: ...
    async def spread(self) -> None: ...


class HostedFront:
    def __init__(self, host: Host, sources: Sources, files: ArenaFiles) -> None:
        self._host = host
        self._sources = sources
        self._connection: Connection[UpMessage] = Connection(files.up, files.down, decode_up, self._heard, self._lost)
        self._calls = HostedCalls(sources.models, self._connection)
        self._known = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._asked: set[asyncio.Task[None]] = set()
        self._verbs: dict[str, Callable[..., Awaitable[Any]]] = {
            "load": self._load,
            "unload": self._unload,
            "look_for": self._look_for,
            "look": self._look,
            "refresh": self._refresh,
            "register_region": self._register_region,
            "unregister_region": self._unregister_region,
            "update_tracing": self._update_tracing,
            "update_logs": self._update_logs,
        }

    async def open(self, sock: socket.socket) -> None:
        await self._connection.open(sock)
        self.tell(self._host.joined(self))

    @property
    def requests(self) -> int:
        return len(self._calls)

    def tell(self, messages: Sequence[Described | Published]) -> None:
        for message in messages:
            self._connection.send(message)

    def knows(self, generation: int) -> asyncio.Future[None]:
        """Done when the front answers by this generation, or has gone."""
        future = asyncio.get_running_loop().create_future()
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
        for task in list(self._asked):
            task.cancel()
        self._settle(lambda generation: True)

    def _heard(self, message: UpMessage, tail: memoryview) -> None:
        """Raises ValueError, LookupError and TypeError for a message that no front sends."""
        if isinstance(message, Infer):
            self._calls.infer(message, tail)
        elif isinstance(message, Cancel):
            self._calls.cancel(message.number)
        elif isinstance(message, Taken):
            self._calls.taken(message)
        elif isinstance(message, Ask):
            data = self._connection.take_data(message.data, tail)
            task = asyncio.get_running_loop().create_task(self._answer(message, data))
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)
        elif isinstance(message, Known):
            self._known = message.generation
            self._settle(lambda generation: generation <= self._known)
        elif isinstance(message, Traced):
            self._sources.tracing.keep(message.model, message.traces)

    def _settle(self, settled: Callable[[int], bool]) -> None:
        for generation, future in self._waiting:
            if settled(generation) and not future.done():
                future.set_result(None)
        self._waiting = [each for each in self._waiting if not each[1].done()]

    # Questions

    async def _answer(self, ask: Ask, data: list[bytes]) -> None:
        value, error = None, None
        try:
            arguments = [*ask.arguments, data] if ask.data else ask.arguments
            value = await self._verbs[ask.verb](*arguments)
        except Exception as failure:
            error = to_fields(failure)
        self._connection.send(Reply(ask.number, value, error))

    async def _load(self, name: str, config: str | None, paths: list[str], data: Sequence[bytes] = ()) -> None:
        files = dict(zip(paths, data, strict=True))
        try:
            await self._sources.models.load(name, config=config, files=files or None)
        finally:
            await self._host.spread()

    async def _unload(self, name: str, unload_dependents: bool) -> None:
        try:
            await self._sources.models.unload(name, unload_dependents=unload_dependents)
        finally:
            await self._host.spread()

    async def _look_for(self, name: str, version: str) -> None:
        self._sources.models.model(name, version)
        self._host.publish()

    async def _look(self) -> None:
        self._host.publish()

    async def _refresh(self) -> list[Any]:
        """The lines of the index, and the statistics of all models, by name and version."""
        self._host.publish()
        models = self._sources.models
        return [
            [(line.name, line.version, line.state, line.reason) for line in models.index(ready=False)],
            [(each.name, each.version, statistics_fields(each.statistics)) for each in models.models()],
        ]

    async def _register_region(
        self, tenant: str, roles: list[str], name: str, key: str, offset: int, byte_size: int
    ) -> None:
        self._sources.regions.of(_principal(tenant, roles)).register(name, key, offset, byte_size)
        await self._host.spread()

    async def _unregister_region(self, tenant: str, roles: list[str], name: str) -> None:
        self._sources.regions.of(_principal(tenant, roles)).unregister(name)
        await self._host.spread()

    async def _update_tracing(self, values: dict[str, Any], model: str) -> None:
        self._sources.tracing.update(values, model)
        await self._host.spread()

    async def _update_logs(self, values: dict[str, Any]) -> None:
        self._sources.logs.update(values)
        await self._host.spread()


def _principal(tenant: str, roles: list[str]) -> Principal:
    return Principal(tenant=tenant, roles=frozenset(map(Role, roles)))
