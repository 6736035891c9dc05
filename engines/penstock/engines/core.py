"""The engine core: one iteration at a time, no I/O, no concurrency."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from penstock.engines.adapter_messages import carry_out
from penstock.engines.contract.messages import (
    AbortRequests,
    AdapterReply,
    AddRequest,
    DownMessage,
    EngineStats,
    RequestOutput,
    StepOutputs,
    StepRecord,
)
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.runner import ModelRunner
from penstock.engines.contract.step import ModelRunnerOutput, SchedulerOutput
from penstock.engines.errors import StepFailedError
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.integrity import check_integrity
from penstock.engines.scheduler.scheduler import Scheduler
from penstock.kvcache import KVCacheManager

logger = logging.getLogger(__name__)

_MAX_FAILURES = 3
"""Failed steps in a row after which a fresh process is the better chance."""


class Core(Protocol):
    """What an engine process works: requests in, one message out for each step."""

    @property
    def broken(self) -> bool:
        """Nothing more will come of it: what is still live wants a new process."""
        ...

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

    @property
    def next_look(self) -> float | None:
        """When it wants a step at the latest, even if there is no work: a request's time is over then."""
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
        """Steps that raised since the last good one."""
        self._clock = clock

    @property
    def info(self) -> ModelInfo:
        return self.runner.info

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_requests

    @property
    def broken(self) -> bool:
        return self.failures_in_a_row >= _MAX_FAILURES

    wakeup: int | None = None
    next_look: float | None = None

    def stats(self) -> EngineStats:
        return self.scheduler.stats()

    def close(self) -> None:
        self.runner.close()

    def step(self, messages: Iterable[DownMessage]) -> StepOutputs:
        """One iteration: takes in messages, schedules, executes, updates. The result is one message."""
        started = self._clock()
        replies = self._receive(messages, started)
        step = self.scheduler.schedule(started)
        if not step.request_ids:
            return StepOutputs(self.scheduler.take_outputs(), self.scheduler.stats(), [], replies)
        outputs = self._execute(step)
        record = StepRecord(self._clock() - started, len(step.request_ids), step.total_num_scheduled_tokens)
        return StepOutputs(outputs, self.scheduler.stats(), [record], replies)

    def _receive(self, messages: Iterable[DownMessage], now: float) -> list[AdapterReply]:
        replies = []
        for message in messages:
            if isinstance(message, AddRequest):
                self.scheduler.add(message)
            elif isinstance(message, AbortRequests):
                self.scheduler.abort(message.ids, now)
            else:
                replies.append(carry_out(message, self.runner))
        return replies

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
