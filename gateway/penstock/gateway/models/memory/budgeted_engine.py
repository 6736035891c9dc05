"""An engine process that is started only where its model fits into the memory."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from penstock.engines.process.client import ProcessEngine
from penstock.engines.registry import EngineSpec
from penstock.gateway.models.memory.budget import MemoryBudget, Reservation
from penstock.gateway.models.memory.estimate import estimate


class BudgetedEngine(ProcessEngine):
    """Holds its place in the budget from before the start until after the end, restarts included.

    `name` is what other models' refusals call it; `options` are those of ProcessEngine. `one_of`: so many engines of
    the model share its devices.
    """

    def __init__(
        self, budget: MemoryBudget, name: str, spec: EngineSpec, *args: Any, one_of: int = 1, **options: Any
    ) -> None:
        super().__init__(spec, *args, name=name, **options)
        self._one_of = one_of
        self._budget = budget
        self._declared_spec = spec
        """As the operator wants it. `_spec` says how large its cache became: that holds for restarts, and not once the
        model has slept, since others may have taken the room."""
        self._reservation: Reservation | None = None

    async def start(self) -> None:
        """As `Engine.start`. Raises MemoryBudgetError, with nothing started, when the model does not fit."""
        self._spec = self._declared_spec
        demand = (await asyncio.to_thread(estimate, self._spec)).of_one(self._one_of)
        self._reservation = place = await self._budget.claim(self._name, demand, lambda: self.pid)
        if place.cache is not None:
            options = self._spec.options | {"kv_cache_memory": str(place.cache)}
            self._spec = msgspec.structs.replace(self._spec, options=options)
        try:
            await super().start()
        except BaseException:
            self._budget.release(place)
            raise
        place.loading = False

    async def stop(self, reason: str = "The server was stopped.") -> None:
        if self._reservation is None:
            return await super().stop(reason)
        self._reservation.ending = True
        try:
            await super().stop(reason)
        finally:
            self._budget.release(self._reservation)
