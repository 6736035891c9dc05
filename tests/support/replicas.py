"""Engines in this process that die and come back when a test says so."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.engine_view import EngineView
from penstock.engines.contract.messages import AddRequest
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.runner import ModelRunner
from penstock.engines.errors import NotReadyError
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.simulated import SimulatedConfig, SimulatedRunner
from support.inline_engine import InlineEngine


class MortalEngine:
    """Implements Engine. `make` gives the runner of each life."""

    def __init__(self, make: Callable[[], ModelRunner], **scheduler: object) -> None:
        self._make = make
        self._config = SchedulerConfig(**scheduler)  # type: ignore[arg-type]
        self._alive: InlineEngine | None = None
        self._next_id = 1
        self.received: list[AddRequest] = []
        self.fingerprint: str | None = None
        self.gone = False
        """It will not come back."""
        self.counted: int | None = None
        """What it says to have taken in, if that is not what it has."""

    def becomes(self, config: SimulatedConfig) -> None:
        """From its next start on."""
        self._make = lambda: SimulatedRunner(config)

    @property
    def _engine(self) -> InlineEngine:
        if self._alive is None:
            raise NotReadyError("The engine is being restarted.")
        return self._alive

    @property
    def info(self) -> ModelInfo:
        return self._engine.core.info

    @property
    def ready(self) -> bool:
        return self._alive is not None and self._alive.ready

    @property
    def failed(self) -> bool:
        return self.gone

    @property
    def stats(self) -> EngineStats:
        if self.counted is not None:
            return EngineStats(admitted=self.counted)
        return EngineStats() if self._alive is None else self._alive.stats

    async def start(self) -> None:
        self._alive = InlineEngine(self._make(), self._config, time.monotonic)
        await self._alive.start()

    async def die(self) -> None:
        """As a process does: what is under way ends, nothing is left."""
        engine, self._alive = self._engine, None
        await engine.stop("The engine died while it worked on this request.")

    def new_ids(self, count: int) -> tuple[int, ...]:
        first, self._next_id = self._next_id, self._next_id + count
        return tuple(range(first, self._next_id))

    def submit(self, requests: Sequence[AddRequest]) -> RequestStream:
        engine = self._engine
        self.received += requests
        return engine.submit(requests)

    def abort(self, ids: Sequence[int]) -> None:
        if self._alive is not None:
            self._alive.abort(ids)

    async def load_adapter(self, key: str, folder: Path) -> None:
        await self._engine.load_adapter(key, folder)

    async def unload_adapter(self, key: str) -> None:
        if self._alive is not None:
            await self._alive.unload_adapter(key)

    async def reset_prefix_cache(self) -> None:
        await self._engine.reset_prefix_cache()

    async def inspect(self, since_steps: Sequence[int] = ()) -> list[EngineView | None]:
        return await self._engine.inspect(since_steps)

    async def stop(self, reason: str = "The server was stopped.") -> None:
        if self._alive is not None:
            engine, self._alive = self._alive, None
            await engine.stop(reason)
