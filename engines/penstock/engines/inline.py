"""An engine in the gateway's own process and event loop: for tests, and for embedding without a second process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from penstock.engines.base import ModelRunner
from penstock.engines.core import EngineCore
from penstock.engines.errors import EngineDeadError, NotReadyError
from penstock.engines.messages import (
    AddRequest,
    DownMessage,
    EngineStats,
    ModelInfo,
)
from penstock.engines.routing import StreamTable
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.stream import RequestStream


class InlineEngine:
    """Implements Engine. A step blocks the event loop, which yields between steps."""

    def __init__(
        self, runner: ModelRunner, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.core = EngineCore(runner, config, clock)
        self._inbox: list[DownMessage] = []
        self._streams = StreamTable(self._send)
        self._stats = self.core.stats()
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def info(self) -> ModelInfo:
        return self.core.runner.info

    @property
    def ready(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def failed(self) -> bool:
        return self._task is not None and self._task.done()

    @property
    def stats(self) -> EngineStats:
        return self._stats

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._inbox or self.core.has_work:
                self._step()
                await asyncio.sleep(0)

    def _step(self) -> None:
        messages, self._inbox = self._inbox, []
        try:
            result = self.core.step(messages)
        except Exception:
            # not the runner's failure, which the core takes: the books may be wrong now, nobody can be served any more
            self._streams.fail_all(EngineDeadError("The engine has failed."))
            raise
        self._stats = result.stats
        self._streams.deliver(result.outputs)

    def new_ids(self, count: int) -> tuple[int, ...]:
        return self._streams.new_ids(count)

    def submit(self, requests: Sequence[AddRequest]) -> RequestStream:
        if not self.ready:
            raise NotReadyError("The engine is not running.")
        return self._streams.submit(requests)

    def abort(self, ids: Sequence[int]) -> None:
        self._streams.abort(ids)

    def _send(self, messages: Sequence[DownMessage]) -> None:
        self._inbox.extend(messages)
        self._wake.set()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._streams.fail_all(EngineDeadError("The engine was stopped."))
        self.core.runner.close()
