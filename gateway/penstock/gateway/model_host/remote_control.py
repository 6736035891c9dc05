"""The server as a whole, from one of its fronts: the model host changes it, and tells every front before it answers."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.gateway.front.context import Principal
from penstock.gateway.model_host.remote_calls import RemoteCalls
from penstock.gateway.model_host.remote_store import RemoteModelStore


class RemoteControl:
    """Implements Control."""

    def __init__(self, calls: RemoteCalls, store: RemoteModelStore) -> None:
        self._calls = calls
        self._store = store

    async def look_for(self, name: str, version: str) -> None:
        await self._calls.ask("look_for", name, version)

    async def look(self) -> None:
        await self._calls.ask("look")

    async def refresh(self) -> None:
        await self._store.refresh()

    async def register_region(self, caller: Principal, name: str, key: str, offset: int, byte_size: int) -> None:
        await self._calls.ask("register_region", caller.tenant, sorted(caller.roles), name, key, offset, byte_size)

    async def unregister_region(self, caller: Principal, name: str) -> None:
        await self._calls.ask("unregister_region", caller.tenant, sorted(caller.roles), name)

    async def update_tracing(self, values: Mapping[str, object], model: str) -> None:
        await self._calls.ask("update_tracing", dict(values), model)

    async def update_logs(self, values: Mapping[str, object]) -> None:
        await self._calls.ask("update_logs", dict(values))
