"""A model whose engine gives its memory back while nobody needs it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine

from penstock.engines.client.engine import Engine
from penstock.engines.errors import NotReadyError, PenstockError, QueueFullError
from penstock.gateway.models.language.adapters import CallCounter

logger = logging.getLogger(__name__)

_RETRY_AFTER = 2.0
_MOST_WAITING = 1024
"""Calls that wait at once until an engine is there again."""


class ModelSleep:
    """Stops an engine, and starts it again. An engine that was put to sleep refuses requests until it is woken. One
    that fell asleep because it was idle starts at the next request, which waits for it."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        calls: CallCounter,
        idle_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`idle_seconds`: falls asleep after so long without a call; 0: never."""
        self._name = name
        self._engine = engine
        self._calls = calls
        self.falls_asleep = idle_seconds > 0
        """Whether the operator wants it to sleep while it is idle."""
        self._usual_idle_seconds = self._idle_seconds = idle_seconds or None
        self._clock = clock
        self.asleep = False
        """The engine is stopped, or is about to stop, or is starting again."""
        self._sleep_ordered = False
        self._lock = asyncio.Lock()
        """Held while the engine stops or starts."""
        self.on_change: Callable[[], None] = _nobody
        """Called when `stays_awake` may have changed."""
        self._waking: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._until_idle: asyncio.Task[None] | None = None
        """Waits for the calls that run, and looks again then."""

    @property
    def wakes_by_itself(self) -> bool:
        """It sleeps, and the next request wakes it."""
        return self.asleep and not self._sleep_ordered

    @property
    def stays_awake(self) -> bool:
        """It is awake, and does not fall asleep by itself."""
        return not (self.asleep or self._sleep_ordered or self._idle_seconds is not None)

    @property
    def seconds_left(self) -> float | None:
        """Until it falls asleep if no call comes; None: it does not."""
        if self._idle_seconds is None:
            return None
        return max(0.0, self._calls.idle_since + self._idle_seconds - self._clock())

    def begin(self) -> None:
        """The engine has been started."""
        self._look_later()

    async def end(self) -> None:
        """Before the engine is stopped for good."""
        self._idle_seconds = None
        self._stop_looking()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def keep(self, seconds: float | None) -> None:
        """Until it sleeps: it does so after so long without a call; None: it stays awake."""
        self._idle_seconds = seconds
        self._look_later()
        self.on_change()

    async def awake(self) -> None:
        """Returns when the engine is there. The caller counts as a call already.

        Raises NotReadyError while it sleeps because it was told to, QueueFullError, and as `Engine.start`.
        """
        if self._sleep_ordered:
            message = f"The model `{self._name}` sleeps, and serves nothing until it is woken (POST /wake_up)."
            raise NotReadyError(message, retry_after=_RETRY_AFTER)
        if self.asleep:
            if self._calls.calls > _MOST_WAITING:
                raise QueueFullError("Too many requests wait for this model to wake up.", retry_after=_RETRY_AFTER)
            await asyncio.shield(self._wake_once())

    async def sleep(self, *, wait: bool) -> None:
        """Stops the engine; from now on requests are refused. `wait`: those that run end first; otherwise they end with
        an error."""
        self._sleep_ordered = True
        self.on_change()
        await asyncio.shield(self._task(self._sleep(wait)))

    async def wake(self) -> None:
        """Starts the engine again, if it sleeps. Raises as `Engine.start`; then it sleeps on."""
        ordered, self._sleep_ordered = self._sleep_ordered, False
        try:
            await asyncio.shield(self._wake_once())
        except PenstockError:
            self._sleep_ordered = ordered
            raise
        self.on_change()

    def _wake_once(self) -> asyncio.Task[None]:
        """One start for all that wait."""
        if self._waking is None or self._waking.done():
            self._waking = self._task(self._wake())
        return self._waking

    async def _wake(self) -> None:
        async with self._lock:
            if self.asleep:
                started = self._clock()
                await self._engine.start()
                self.asleep = False
                self._idle_seconds = self._usual_idle_seconds
                logger.info("%s is awake again, after %.1f s", self._name, self._clock() - started)
                self._look_later()
                self.on_change()

    async def _sleep(self, wait: bool) -> None:
        async with self._lock:
            if wait:
                await self._calls.wait_idle()
            if self._sleep_ordered and not self.asleep:
                self._stop_looking()
                self.asleep = True
                await self._stop("The model was put to sleep.")

    async def _fall_asleep(self) -> None:
        async with self._lock:
            await self._stop("The model fell asleep.")

    async def _stop(self, reason: str) -> None:
        await self._engine.stop(reason)
        logger.info("%s sleeps", self._name)

    # -- looking whether it is idle -----------------------------------------------------------------------------

    def _look_later(self) -> None:
        self._stop_looking()
        left = self.seconds_left
        if left is not None and not self.asleep:
            self._timer = asyncio.get_running_loop().call_later(left, self._look)

    def _stop_looking(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        if self._calls.calls or self._calls.held:  # their end counts
            if self._until_idle is None or self._until_idle.done():
                self._until_idle = self._task(self._look_when_idle())
        elif self.seconds_left:
            self._look_later()
        elif not (self.asleep or self._sleep_ordered):
            self.asleep = True  # at once: a call that comes while it stops waits for the lock, and starts it again
            self._task(self._fall_asleep())

    async def _look_when_idle(self) -> None:
        await self._calls.wait_idle()
        self._look_later()

    def _task(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%s cannot be woken or put to sleep: %s", self._name, error)


def _nobody() -> None:
    """The default of `on_change`."""
