"""An engine in the test's own process and event loop, over a core that the test holds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from penstock.engines.client.base import EngineClient
from penstock.engines.contract.core import Core
from penstock.engines.contract.messages import DownMessage
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.runner import ModelRunner
from penstock.engines.core import EngineCore
from penstock.engines.errors import EngineDeadError, NotReadyError
from penstock.engines.scheduler.config import SchedulerConfig

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=Core)


class CoreEngine(EngineClient, Generic[C]):
    """Implements Engine over a core of either kind. A step blocks the event loop, which yields between steps."""

    def __init__(self, core: C, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__({})
        self.core = core
        self._clock = clock
        self._inbox: list[DownMessage] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stats = core.stats()

    @property
    def info(self) -> ModelInfo:
        return self.core.info

    @property
    def ready(self) -> bool:
        return self._task is not None and not self._task.done()

    @property
    def failed(self) -> bool:
        return self._task is not None and self._task.done()

    async def start(self) -> None:
        for descriptor in self.core.wakeups:
            asyncio.get_running_loop().add_reader(descriptor, self._wake.set)
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            while not self.core.broken:
                if not (self._inbox or self.core.has_work):
                    await self._something()
                self._step()
                await asyncio.sleep(0)
        except Exception:
            logger.exception("a step failed: the engine's state may be wrong now, so it serves no more requests")
            raise
        finally:
            for descriptor in self.core.wakeups:
                asyncio.get_running_loop().remove_reader(descriptor)
            self._fail_all(EngineDeadError("The engine has failed."))

    async def _something(self) -> None:
        """Waits for a message, for one of the core's file descriptors, or until the core needs a step anyway."""
        look = self.core.next_look
        try:
            async with asyncio.timeout(None if look is None else max(0.0, look - self._clock())):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    def _step(self) -> None:
        messages, self._inbox = self._inbox, []
        self._take_step(self.core.step(messages))
        self._streams.call_listeners()

    def _require(self) -> None:
        if not self.ready:
            raise NotReadyError("The engine is not running.")

    def _send(self, messages: Sequence[DownMessage]) -> None:
        self._inbox.extend(messages)
        self._wake.set()

    async def stop(self, reason: str = "The engine was stopped.") -> None:
        self._streams.fail_all(EngineDeadError(reason))
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self.core.close()


class InlineEngine(CoreEngine[EngineCore]):
    """A model runner under our scheduler."""

    def __init__(
        self, runner: ModelRunner, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(EngineCore(runner, config, clock), clock)
