"""Liveness of an engine process, judged by what it reports: slow is not hung."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from enum import Enum, auto
from typing import Any

import msgspec

from penstock.engines.client.base import RETRY_AFTER, EngineClient
from penstock.engines.contract.messages import Heartbeat, StepOutputs, StepRecord
from penstock.engines.errors import EngineDeadError

_BEATS_WITHIN = 4
"""Heartbeats within the shortest bound, at least: a single one that is late means nothing."""
_MOST_SECONDS_BETWEEN_BEATS = 1.0
_LEAST_SECONDS_BETWEEN_BEATS = 0.05
"""More of them would keep two processes busy with nothing else."""
_SECOND_LOOK = 0.5
"""Seconds until a process that seems to hang is judged once more: perhaps this process stood still, and what the other
one has sent is unread."""


class WatchdogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How long an engine process may take, in seconds, and how often it may be replaced."""

    ready_timeout: float = 10.0
    """Without progress for so long, the process counts as slow: `ready` is false until it goes on."""
    slow_factor: float = 3.0
    """A step may take this many times what it was expected to, if that is longer than `ready_timeout`."""
    timeout: float = 60.0
    """Without progress for so long, the process counts as hung: it is killed and replaced."""
    hung_factor: float = 10.0
    """As `slow_factor`, for `timeout`."""
    load_timeout: float = 1800.0
    """For the model to be loaded, before the process is killed; 0: as long as it takes."""
    max_restarts: int = 5
    """Within `restart_window`; then the engine stays down and the server says so."""
    restart_window: float = 600.0
    """Counted while the engine serves: loading time does not count."""

    @property
    def heartbeat_interval(self) -> float:
        shortest = min(self.ready_timeout, self.timeout)
        return min(_MOST_SECONDS_BETWEEN_BEATS, max(_LEAST_SECONDS_BETWEEN_BEATS, shortest / _BEATS_WITHIN))


class EngineHealth(Enum):
    LIVE = auto()
    SLOW = auto()
    HUNG = auto()


class Liveness:
    """Judges one process that has loaded its model. Knows no clock: times are seconds of one that is passed in.

    A process makes no progress while it is silent, and while a step goes on. How long the step has taken the process
    reports itself (`Heartbeat`), from a thread that runs beside the step. Both times have the same bounds, which grow
    with what the step was expected to take. Without an expectation (first step, engines with their own scheduler) the
    bounds are as set.
    """

    def __init__(self, config: WatchdogConfig, now: float) -> None:
        self._config = config
        self._heard_at = now
        self.step_seconds = 0.0
        """How long the step under way had taken at the last heartbeat; 0 with none."""
        self._expected_seconds = 0.0

    def heard(self, now: float) -> None:
        """A message has come."""
        self._heard_at = now

    def stepped(self) -> None:
        """A step's result has come: the time of the next one starts at 0."""
        self.step_seconds = 0.0

    def beat(self, beat: Heartbeat, now: float) -> None:
        self._heard_at = now
        self.step_seconds = beat.step_seconds
        self._expected_seconds = beat.expected_seconds or 0.0

    def silence(self, now: float) -> float:
        """Seconds since the last message of any kind."""
        return now - self._heard_at

    def judge(self, now: float) -> EngineHealth:
        stuck = max(self.step_seconds, self.silence(now))
        if stuck >= max(self._config.timeout, self._config.hung_factor * self._expected_seconds):
            return EngineHealth.HUNG
        if stuck >= max(self._config.ready_timeout, self._config.slow_factor * self._expected_seconds):
            return EngineHealth.SLOW
        return EngineHealth.LIVE

    def complaint(self, now: float) -> str:
        """Why it is not live, for the operator."""
        if self.silence(now) >= self.step_seconds:
            return f"it gave no sign of life for {self.silence(now):.1f} s"
        seconds = self._expected_seconds
        rounded = f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.2g}"
        expected = f"{rounded} s were expected" if seconds else "nothing was expected"
        return f"its step has taken {self.step_seconds:.1f} s ({expected})"


class Watched(EngineClient):
    """An engine that is one process, on this machine or another one, of which something is heard now and then."""

    def __init__(
        self,
        config: WatchdogConfig | None,
        loaded: Mapping[str, str],
        on_step: Callable[[StepRecord], None] | None,
    ) -> None:
        super().__init__(loaded, on_step)
        self._watchdog = config or WatchdogConfig()
        self._supervision: asyncio.Task[None] | None = None
        self.liveness = Liveness(self._watchdog, time.monotonic())
        """Of the newest process."""
        self.num_restarts = 0

    @property
    def _beat_interval(self) -> float:
        return self._watchdog.heartbeat_interval

    @property
    def is_live(self) -> bool:
        return self.liveness.judge(time.monotonic()) is EngineHealth.LIVE

    def _take_step(self, result: StepOutputs) -> None:
        if result.steps:
            self.liveness.stepped()
        super()._take_step(result)

    async def _until_dead(self, ended: asyncio.Future[Any], ping: Callable[[], None] | None = None) -> str | None:
        """Waits until `ended` is done, or the engine hangs: then returns why. `ping` makes it say something."""
        while True:
            done, _ = await asyncio.wait((ended,), timeout=self._beat_interval)
            if ping is not None and not done:
                ping()
            if not done and self.liveness.judge(time.monotonic()) is EngineHealth.HUNG:
                done, _ = await asyncio.wait((ended,), timeout=_SECOND_LOOK)
                now = time.monotonic()
                if not done and self.liveness.judge(now) is EngineHealth.HUNG:
                    return self.liveness.complaint(now)
            if done:
                return None

    def _died(self) -> None:
        """Ends all that was under way."""
        self._fail_all(EngineDeadError("The engine died while it worked on this request.", retry_after=RETRY_AFTER))

    async def _end_supervision(self) -> None:
        if self._supervision is not None:
            self._supervision.cancel()
            await asyncio.gather(self._supervision, return_exceptions=True)
            self._supervision = None
