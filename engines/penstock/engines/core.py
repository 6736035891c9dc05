"""The engine core: one iteration at a time, no I/O, no concurrency."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec

from penstock.engines.adapter_loading import adapter_loader
from penstock.engines.block_reader import BlockMover
from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.messages import (
    AbortRequests,
    AddRequest,
    CallReply,
    DownMessage,
    Inspect,
    ResetPrefixCache,
    SamplingParams,
    StepOutputs,
    StepRecord,
)
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.runner import ModelRunner
from penstock.engines.contract.step_ring import StepRing
from penstock.engines.errors import StepFailedError, UnsupportedError
from penstock.engines.grammar_compiling import GrammarCompilations
from penstock.engines.image_encoding import image_encodings
from penstock.engines.offload.offload import OffloadTier, offload_tier
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.integrity import check_integrity
from penstock.engines.scheduler.pending import Pending, SideWork
from penstock.engines.scheduler.running import StepUnderWay
from penstock.engines.scheduler.scheduler import Scheduler
from penstock.engines.scheduler.view import scheduler_view
from penstock.kvcache import IntegrityError, KVCacheManager

if TYPE_CHECKING:
    from penstock.engines.handover.handover import SharedCache
    from penstock.engines.kv_events.publisher import KVEventPublisher
    from penstock.engines.kv_events.settings import KVEventsConfig

logger = logging.getLogger(__name__)

_MAX_FAILURES = 3
"""Requests in a row that failed alone, with no good step in between, after which the process ends: a new one may
work."""


class EngineCore:
    """Scheduler, KV cache book-keeping and runner, wired together. Its owner calls `step` while `has_work`."""

    def __init__(self, runner: ModelRunner, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        """Raises UnsupportedError for guesses that the runner cannot verify, EngineError for an address that events
        cannot be published at, and as `offload_tier` and `shared_cache`."""
        if config.speculative != "off" and not runner.info.supports_drafts:
            raise UnsupportedError(f"--speculative: this engine cannot verify guesses ({runner.info.runner}).")
        if config.speculative == "draft_model" and not runner.info.has_draft_model:
            raise UnsupportedError(f"--speculative-model: this engine has no draft model ({runner.info.runner}).")
        self.runner = runner
        self._depth = min(config.steps_in_flight, runner.max_steps_in_flight)
        config = msgspec.structs.replace(config, steps_in_flight=self._depth)
        beyond = _beyond_the_cache(runner, config)
        self.scheduler = Scheduler(config, runner.info, None if beyond is None else beyond.kv)
        self.blocks: BlockMover | None = None
        if beyond is not None and self.scheduler.prefetches is not None:
            self.blocks = beyond.begin(self.scheduler.prefetches, clock)
        self.kv_events = _publisher(config.kv_events, self.scheduler.kv) if config.kv_events else None
        self.adapters = adapter_loader(runner, self.scheduler.intake, clock)
        self.grammars = GrammarCompilations(runner, self.scheduler.intake, clock)
        self.images = image_encodings(runner, self.scheduler.intake, clock)
        beside = (self.adapters, self.grammars, self.images, self.blocks)
        self.side_work: tuple[SideWork, ...] = tuple(work for work in beside if work is not None)
        self.failures_in_a_row = 0
        """Requests that failed alone since the last good step."""
        self.broken = False
        self.ring = StepRing()
        self._clock = clock
        self._last_collected = 0.0

    @property
    def info(self) -> ModelInfo:
        return self.scheduler.info

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    @property
    def wakeups(self) -> Sequence[int]:
        return [wakeup for work in self.side_work for wakeup in work.wakeups]

    @property
    def next_look(self) -> float | None:
        looks = (self.scheduler.intake.next_deadline, *(work.next_look for work in self.side_work))
        return min((look for look in looks if look is not None), default=None)

    @property
    def expected_seconds(self) -> float | None:
        return sum(steps.expected_seconds for steps in tuple(self.scheduler.under_way)) or None

    quiet_since: float | None = None

    def stats(self) -> EngineStats:
        stats = self.scheduler.stats()
        if self.blocks is not None:
            self.blocks.report(stats)
        return stats

    def close(self) -> None:
        if self.blocks is not None:
            self.blocks.close(save=not self.broken)
        if self.kv_events is not None:
            self.kv_events.close()
        self.adapters.close()
        self.grammars.close()
        if self.images is not None:
            self.images.close()
        self.runner.close()

    def step(self, messages: Iterable[DownMessage]) -> StepOutputs:
        """One iteration: takes in messages, submits steps, and takes in the oldest one's result."""
        replies = self._receive(messages)
        for work in self.side_work:
            if work.under_way:
                replies += work.advance()
        records: list[StepRecord] = []
        if self._submit() and self.scheduler.under_way:
            self._collect(records)
        if self.kv_events is not None:
            self.kv_events.publish()
        outputs = self.scheduler.take_outputs()
        if not self.scheduler.has_requests and not self.scheduler.under_way:
            self._check_idle()
        return StepOutputs(outputs, self.stats(), records, replies)

    def _receive(self, messages: Iterable[DownMessage]) -> list[CallReply]:
        """Returns the replies to messages that are carried out at once."""
        replies: list[CallReply] = []
        for message in messages:
            if isinstance(message, AddRequest):
                self.scheduler.add(message, self._needs_of)
            elif isinstance(message, AbortRequests):
                self.scheduler.abort(message.ids, self._clock())
            elif isinstance(message, ResetPrefixCache):
                self._reset_prefix_cache()
                replies.append(CallReply(message.call))
            elif isinstance(message, Inspect):
                steps = self.ring.rows(message.since_step)
                replies.append(CallReply(message.call, view=scheduler_view(self.scheduler, steps, self._clock())))
            else:
                replies += self.adapters.receive(message)
        return replies

    def _needs_of(self, message: AddRequest) -> Sequence[Pending]:
        """What side work brings for a request (`NeedsOf`)."""
        needs: list[Pending] = []
        if message.adapter:
            needs += self.adapters.needs_of(message)
        if isinstance(message.params, SamplingParams) and message.params.grammar is not None:
            needs += self.grammars.needs_of(message)
        if self.images is not None and message.images:
            needs += self.images.needs_of(message)
        return needs

    def _reset_prefix_cache(self) -> None:
        self.scheduler.kv.clear_cache()
        if self.blocks is not None:
            self.blocks.clear()

    def _submit(self) -> bool:
        """Submits steps until as many are under way as may be, or there is nothing to compute. False when one
        failed."""
        while len(self.scheduler.under_way) < self._depth:
            step = self.scheduler.schedule(self._clock())
            if self.blocks is not None:
                self.blocks.begin()
            if not step.request_ids:
                break
            self._write_down(self.scheduler.under_way[-1])
            try:
                if self.blocks is not None:
                    self.blocks.carry_out(step)
                self.runner.submit(step)
            except Exception:
                self._recover(self.scheduler.under_way[-1])
                return False
        return True

    def _write_down(self, step: StepUnderWay) -> None:
        scheduler = self.scheduler
        self.ring.begins(
            step.scheduled_at,
            len(step.runs),
            step.step.total_num_scheduled_tokens,
            len(scheduler.running.runs),
            scheduler.num_waiting,
            scheduler.kv.pool.num_free,
        )

    def _collect(self, records: list[StepRecord]) -> None:
        """Waits for the oldest step's result; the next one computes while this is looked at."""
        done = self.scheduler.under_way[0]
        try:
            result = self.runner.collect()
        except Exception:
            self._recover(done)
            return
        now = self._clock()
        seconds = now - max(done.scheduled_at, self._last_collected)
        self._last_collected = now
        self.failures_in_a_row = 0
        self.ring.ends(seconds)
        prompt_tokens = self.scheduler.intake.stats.prompt_tokens
        self.scheduler.update_from_output(result, now, seconds)
        prompt_tokens = self.scheduler.intake.stats.prompt_tokens - prompt_tokens
        if prompt_tokens:
            self.ring.had_prompts(prompt_tokens)
        if self.blocks is not None:
            self.blocks.collected()
        records.append(StepRecord(seconds, len(done.runs), done.step.total_num_scheduled_tokens))

    def _recover(self, failed: StepUnderWay) -> None:
        """The step's requests will run again in halves, until the one that makes it fail is alone. Called while the
        exception is handled."""
        logger.exception("a step of %d requests failed", len(failed.runs))
        self.ring.fails()
        if len(failed.runs) == 1:
            self.failures_in_a_row += 1
            self.broken = self.failures_in_a_row >= _MAX_FAILURES
        try:
            self.runner.reset()
        except Exception:
            logger.exception("the runner cannot be reset")
            self.broken = True
        self.scheduler.step_failed(failed, StepFailedError("The engine failed on this request."), self._clock())

    def _check_idle(self) -> None:
        """A leaked block stays lost until nothing can run: a new process starts with none."""
        try:
            self.scheduler.check_idle()
        except IntegrityError:
            logger.exception("KV-cache accounting check failed")
            self.broken = True

    def check_integrity(self) -> None:
        """Raises IntegrityError when queues, seats, steps under way or blocks contradict one another."""
        check_integrity(self.scheduler)


def _beyond_the_cache(runner: ModelRunner, config: SchedulerConfig) -> OffloadTier | SharedCache | None:
    """Where blocks go, or come from, beyond the runner's KV cache."""
    if config.handover is not None:
        from penstock.engines.handover.handover import shared_cache

        return shared_cache(runner, config.handover)
    return offload_tier(runner, config) if config.kv_offload_dir else None


def _publisher(config: KVEventsConfig, kv: KVCacheManager) -> KVEventPublisher:
    from penstock.engines.kv_events.publisher import KVEventPublisher  # it brings ZeroMQ

    return KVEventPublisher(config, kv)
