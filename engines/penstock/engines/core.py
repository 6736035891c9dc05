"""The engine core: one iteration at a time, no I/O, no concurrency."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from penstock.engines.base import ModelRunner
from penstock.engines.errors import StepFailedError
from penstock.engines.messages import (
    AddRequest,
    DownMessage,
    EngineStats,
    ModelInfo,
    RequestOutput,
    StepOutputs,
    StepRecord,
)
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.integrity import check_integrity
from penstock.engines.scheduler.output import ModelRunnerOutput, SchedulerOutput
from penstock.engines.scheduler.scheduler import Scheduler
from penstock.kvcache import KVCacheManager

logger = logging.getLogger(__name__)


class Core(Protocol):
    """What an engine process works: requests in, one message out for each step."""

    failures_in_a_row: int
    """Steps that raised since the last good one. What fails again and again wants a new process."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def has_work(self) -> bool:
        """`step` would get something done now."""
        ...

    @property
    def wakeup(self) -> int | None:
        """A file descriptor that is readable when that changes by itself (`Batcher.wakeup`)."""
        ...

    def step(self, messages: Iterable[DownMessage]) -> StepOutputs:
        """Takes in messages, advances, and says what came of it."""
        ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


class EngineCore:
    """Scheduler, KV cache book-keeping and runner, wired together. Its owner calls `step` while `has_work`."""

    def __init__(self, runner: ModelRunner, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        info = runner.info
        self.runner = runner
        self.scheduler = Scheduler(
            config,
            KVCacheManager(info.num_blocks, info.block_size, enable_prefix_caching=config.enable_prefix_caching),
            max_model_len=info.max_model_len,
            eos_token_ids=info.eos_token_ids,
        )
        self.failures_in_a_row = 0
        self._clock = clock

    @property
    def info(self) -> ModelInfo:
        return self.runner.info

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_requests

    wakeup: int | None = None

    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def close(self) -> None:
        self.runner.close()

    def step(self, messages: Iterable[DownMessage]) -> StepOutputs:
        """One iteration: takes in adds and aborts, schedules, executes, updates. The result is one message."""
        started = self._clock()
        self._receive(messages, started)
        step = self.scheduler.schedule(started)
        if not step.request_ids:
            return StepOutputs(self.scheduler.take_outputs(), self.scheduler.stats())
        outputs = self._execute(step)
        record = StepRecord(self._clock() - started, len(step.request_ids), step.total_num_scheduled_tokens)
        return StepOutputs(outputs, self.scheduler.stats(), [record])

    def _receive(self, messages: Iterable[DownMessage], now: float) -> None:
        for message in messages:
            if isinstance(message, AddRequest):
                self.scheduler.add(message)
            else:
                self.scheduler.abort(message.ids, now)

    def _execute(self, step: SchedulerOutput) -> list[RequestOutput]:
        """Runs the step. When it raises, its requests end with an error; those that wait go on."""
        try:
            result: ModelRunnerOutput = self.runner.execute(step)
        except Exception:
            logger.exception("a step of %d requests failed", len(step.request_ids))
            self.failures_in_a_row += 1
            self.runner.reset()
            return self.scheduler.fail_step(StepFailedError("The engine failed on this request."), self._clock())
        self.failures_in_a_row = 0
        return self.scheduler.update_from_output(step, result, self._clock())

    def check_integrity(self) -> None:
        """Raises IntegrityError when queues, seats or blocks contradict one another."""
        check_integrity(self.scheduler)
