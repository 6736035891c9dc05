"""Changes of the server as a whole, and questions that not every process of a server can answer by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from penstock.gateway.front.context import Principal
from penstock.gateway.kserve.logs import LogSettings
from penstock.gateway.kserve.shared_memory import SharedMemoryRegions
from penstock.gateway.kserve.tracing import Tracing


class Control(Protocol):
    """What changes something returns when every process that answers requests knows it: a caller's next request may
    reach any of them. All raise PenstockError."""

    async def look_for(self, name: str, version: str) -> None:
        """The store does not have this model: whether it has it now, or the error to tell."""
        ...

    async def look(self) -> None:
        """Before it is told which models are ready, or what the settings are."""
        ...

    async def refresh(self) -> None:
        """Before the store's index or its models' statistics are read."""
        ...

    async def register_region(self, caller: Principal, name: str, key: str, offset: int, byte_size: int) -> None: ...

    async def unregister_region(self, caller: Principal, name: str) -> None: ...

    async def update_tracing(self, values: Mapping[str, object], model: str) -> None: ...

    async def update_logs(self, values: Mapping[str, object]) -> None: ...


class OwnControl:
    """Of a process that owns everything."""

    def __init__(self, regions: SharedMemoryRegions, tracing: Tracing, logs: LogSettings) -> None:
        self._regions = regions
        self._tracing = tracing
        self._logs = logs

    async def look_for(self, name: str, version: str) -> None:
        """Nothing: the store has told what is wrong."""

    async def look(self) -> None:
        """Nothing."""

    async def refresh(self) -> None:
        """Nothing: they are what they are."""

    async def register_region(self, caller: Principal, name: str, key: str, offset: int, byte_size: int) -> None:
        self._regions.of(caller).register(name, key, offset, byte_size)

    async def unregister_region(self, caller: Principal, name: str) -> None:
        self._regions.of(caller).unregister(name)

    async def update_tracing(self, values: Mapping[str, object], model: str) -> None:
        self._tracing.update(values, model)

    async def update_logs(self, values: Mapping[str, object]) -> None:
        self._logs.update(values)
