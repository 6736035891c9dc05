"""The admission queue in front of an engine with a scheduler of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from penstock.engines.adapter_messages import carry_out
from penstock.engines.autonomous.seats import Seats
from penstock.engines.contract.batcher import Batcher, BatcherOutput, NewTokens, StartRequest
from penstock.engines.contract.messages import (
    AbortRequests,
    AdapterReply,
    AddRequest,
    DownMessage,
    EngineStats,
    FinishReason,
    PromptInfo,
    RequestError,
    RequestOutput,
    StepOutputs,
    StepRecord,
)
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import (
    DeadlineExceededError,
    EngineError,
    InvalidRequestError,
    PenstockError,
    StepFailedError,
)
from penstock.engines.scheduler.admission import Admission
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.counters import Counters
from penstock.engines.scheduler.deadlines import Deadlines
from penstock.engines.scheduler.policy import make_queue
from penstock.engines.scheduler.request import Request, RequestStatus
from penstock.engines.scheduler.samples import samples_of
from penstock.kvcache.pool import require

logger = logging.getLogger(__name__)

_PATIENCE = 120.0
"""Seconds without a sign from an engine that holds requests, after which it counts as hung. The gateway's watchdog
cannot know: the process of an engine that runs by itself goes on answering."""


class AutonomousCore:
    """Implements Core over a Batcher.

    Who waits, how long and behind whom is decided here, by the policies and bounds that hold for model runners, too;
    the batcher only ever holds what it can run now. Once handed over, a request is under the engine's own scheduler.
    """

    def __init__(self, batcher: Batcher, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        info = batcher.info
        self.batcher = batcher
        self.config = config
        self.broken = False
        self.requests: dict[int, Request] = {}
        """Without a terminal output so far: those that wait and those that run."""
        self.waiting = make_queue(config.policy)
        self.seats = Seats(config.max_num_seqs, info.num_blocks, info.block_size)
        self._admission = Admission(config, info.num_blocks, info.block_size, info.max_model_len)
        self._deadlines = Deadlines(self.requests.__contains__)
        self._counters = Counters(info.num_blocks)
        self._eos = frozenset(info.eos_token_ids)
        self._outputs: list[RequestOutput] = []
        self._aborting: list[int] = []
        """Running ones that have just been given up; the batcher hears of all of them at once."""
        self._last_sign = 0.0
        """When the batcher last had something to say of the requests that it holds."""
        self._clock = clock

    @property
    def info(self) -> ModelInfo:
        return self.batcher.info

    @property
    def wakeup(self) -> int | None:
        return self.batcher.wakeup

    @property
    def has_work(self) -> bool:
        """Never for an engine that runs by itself: it says through `wakeup` when there is something to fetch."""
        return self.wakeup is None and not self.broken and bool(self.requests or self.seats.aborted)

    @property
    def next_look(self) -> float | None:
        looks = [self._last_sign + _PATIENCE] if self.seats.num_taken else []
        deadline = self._deadlines.next()
        return min(looks if deadline is None else [deadline, *looks], default=None)

    def close(self) -> None:
        self.batcher.close()

    def step(self, messages: Iterable[DownMessage]) -> StepOutputs:
        """Takes in messages, hands over what fits, and fetches what has come: one iteration of the engine, unless it
        runs by itself."""
        started = self._clock()
        replies: list[AdapterReply] = []
        records: list[StepRecord] = []
        try:
            self._receive(messages, replies, started)
            self._expire(started)
            if self.wakeup is None:
                self._hand_over(started)
                records += self._advance(started)
            else:
                self._take_in(self.batcher.step())
                self._hand_over(started)
            if self.seats.num_taken and started - self._last_sign >= _PATIENCE:
                raise EngineError("it has been silent for too long")
        except Exception:
            logger.exception("the engine failed with %d requests", self.seats.num_taken)
            self._break()
        outputs, self._outputs = self._outputs, []
        return StepOutputs(outputs, self.stats(), records, replies)

    # -- requests in -----------------------------------------------------------------------------------------

    def _receive(self, messages: Iterable[DownMessage], replies: list[AdapterReply], now: float) -> None:
        for message in messages:
            if isinstance(message, AddRequest):
                self._add(message)
            elif isinstance(message, AbortRequests):
                for request_id in message.ids:
                    if request_id in self.requests:
                        self._give_up(self.requests[request_id], FinishReason.ABORT, now)
            else:
                replies.append(carry_out(message, self.batcher))

    def _add(self, message: AddRequest) -> None:
        """Queues the samples, or ends them with the reason why not. Ids that are in use are ignored."""
        if any(i in self.requests or i in self.seats.aborted for i in message.ids):
            return
        self._counters.admitted(len(message.ids))
        error = self._admission.refusal(message, len(self.waiting), self.seats.num_free)
        if error is not None:
            for request_id in message.ids:
                self._emit_end(request_id, FinishReason.ERROR, error)
            return
        for request in samples_of(message, self.config, self._eos):
            self.requests[request.id] = request
            if request.deadline is not None:
                self._deadlines.add(request.deadline, request.id)
            self.waiting.push(request)
            self._admission.num_waiting_tokens += request.num_tokens

    def _expire(self, now: float) -> None:
        for request_id in self._deadlines.due(now):
            if request_id in self.requests:
                request = self.requests[request_id]
                what = "scheduled" if request.first_scheduled is None else "complete"
                error = DeadlineExceededError(f"The request's time was over before it was {what}.")
                self._give_up(request, FinishReason.ERROR, now, error)

    # -- to the batcher and back -----------------------------------------------------------------------------

    def _hand_over(self, now: float) -> None:
        """Tells the batcher whom it may forget, and hands it those that it can run now, in order."""
        if self._aborting:
            ids, self._aborting = self._aborting, []
            self.batcher.abort(ids)
        if not len(self.waiting):
            return
        num_free_blocks = self.batcher.num_free_blocks
        while (request := self.waiting.peek()) is not None and self.seats.fits(request, num_free_blocks):
            self.waiting.pop()
            self._admission.num_waiting_tokens -= request.num_tokens
            request.first_scheduled = now
            try:
                self.batcher.start(introduce(request))
            except (PenstockError, ValueError) as error:
                self._end(request, now)
                known = error if isinstance(error, PenstockError) else InvalidRequestError(str(error))
                self._emit_end(request.id, FinishReason.ERROR, known)
                continue
            if not self.seats.num_taken:
                self._last_sign = now
            request.status = RequestStatus.RUNNING
            self.seats.take(request)

    def _advance(self, started: float) -> list[StepRecord]:
        num_requests = self.seats.num_taken
        if not num_requests:
            return []
        result = self.batcher.step()
        self._take_in(result)
        if not result.num_scheduled_tokens:
            return []
        return [StepRecord(self._clock() - started, num_requests, result.num_scheduled_tokens)]

    def _take_in(self, result: BatcherOutput) -> None:
        now = self._clock()
        if result.tokens or result.released or result.num_scheduled_tokens:
            self._last_sign = now
        num_prompt_tokens = 0
        outputs: list[RequestOutput] = []
        for new in result.tokens:
            request = self.seats.running.get(new.id)
            if request is None:
                if new.finish_reason is not None:  # it ended by itself before the abort could reach it
                    self.seats.leave(new.id)
            elif new.token_ids or new.finish_reason is not None:
                if request.id in self.seats.promised:
                    num_prompt_tokens += self._prompt_computed(request, new)
                outputs.append(self._take_tokens(request, new, now))
        for request_id in result.released:
            if request_id in self.seats.aborted:
                self.seats.leave(request_id)
        if result.num_preemptions:
            self._counters.preempted(result.num_preemptions)
            self.seats.preempted()
        if outputs or result.num_scheduled_tokens:
            self._counters.stepped(num_prompt_tokens, outputs)
        self._outputs += outputs

    def _prompt_computed(self, request: Request, new: NewTokens) -> int:
        """The prompt's tokens that had to be computed for these first tokens."""
        self.seats.has_blocks(request.id)
        if new.finish_reason is FinishReason.ERROR:
            return 0
        request.num_cached_tokens = request.charged_tokens = new.num_cached_tokens
        if request.params.prompt_logprobs is None and self.config.enable_prefix_caching:
            self._counters.looked_up(request.num_prompt_tokens, new.num_cached_tokens)
        return request.num_prompt_tokens - new.num_cached_tokens

    def _take_tokens(self, request: Request, new: NewTokens, now: float) -> RequestOutput:
        output = RequestOutput(
            request.id, new.token_ids, new.finish_reason, new.stop_token_id, new.logprobs, prompt=_prompt(request, new)
        )
        request.num_tokens += len(new.token_ids)
        # the newest token is not computed, only sampled
        request.num_computed_tokens = max(request.num_prompt_tokens, request.num_tokens - 1)
        if new.finish_reason is not FinishReason.ERROR:
            self.waiting.charge(request)
        if new.finish_reason is not None:
            error = new.error
            if error is None and new.finish_reason is FinishReason.ERROR:
                error = EngineError("The engine failed on this request.")
            output.error = _wire(error)
            self._counters.finished(new.finish_reason, error)
            self.seats.leave(request.id)
            self._end(request, now)
        return output

    def _break(self) -> None:
        """Ends what the batcher held. Those that wait are the gateway's: this process must go."""
        self.broken = True
        error = StepFailedError("The engine failed on this request.")
        for request_id in list(self.seats.running):
            del self.requests[request_id]
            self.seats.leave(request_id)
            self._emit_end(request_id, FinishReason.ERROR, error)

    # -- requests out ----------------------------------------------------------------------------------------

    def _give_up(self, request: Request, reason: FinishReason, now: float, error: PenstockError | None = None) -> None:
        """Ends a request for its client, wherever it is."""
        if request.status is RequestStatus.RUNNING:
            self.seats.abort(request.id)
            self._aborting.append(request.id)
        else:
            self.waiting.remove(request)
            self._admission.num_waiting_tokens -= request.num_tokens
        self._end(request, now)
        self._emit_end(request.id, reason, error)

    def _end(self, request: Request, now: float) -> None:
        request.status = RequestStatus.FINISHED
        del self.requests[request.id]
        self._admission.finished(now, idle=not self.requests)

    def _emit_end(self, request_id: int, reason: FinishReason, error: PenstockError | None) -> None:
        self._counters.finished(reason, error)
        self._outputs.append(RequestOutput(request_id, [], reason, error=_wire(error)))

    # -- what operators see ----------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters and gauges of this moment; the same object is updated by the next call."""
        stats = self._counters.snapshot()
        stats.num_running = self.seats.num_taken
        stats.num_waiting = len(self.waiting)
        stats.num_waiting_tokens = self._admission.num_waiting_tokens
        stats.num_free_blocks = 0 if self.broken else self.batcher.num_free_blocks
        return stats

    def check_integrity(self) -> None:
        """Raises IntegrityError when queue, seats and promises contradict one another."""
        waiting, seats = list(self.waiting), self.seats
        require(len(waiting) == len(self.waiting), "the queue's length is wrong")
        require(len(waiting) + len(seats.running) == len(self.requests), "a request is lost")
        require(not seats.aborted & self.requests.keys(), "an aborted request is still live")
        require(seats.num_taken <= self.config.max_num_seqs, "more requests than seats")
        require(self._admission.num_waiting_tokens == sum(r.num_tokens for r in waiting), "waiting tokens miscounted")
        require(sum(seats.promised.values()) == seats.num_promised_blocks, "promised blocks miscounted")
        require(seats.promised.keys() <= seats.running.keys() | seats.aborted, "blocks promised to nobody")


def introduce(request: Request) -> StartRequest:
    """All that a batcher must know of a request."""
    return StartRequest(
        request.id,
        request.token_ids,
        request.params,
        None if request.params.seed is None else request.seed,
        request.priority,
        request.cache_salt,
        request.adapter,
    )


def _prompt(request: Request, new: NewTokens) -> PromptInfo | None:
    """For the first output of a request whose prompt was computed."""
    if request.num_computed_tokens or new.finish_reason is FinishReason.ERROR:
        return None
    queued = (request.first_scheduled or request.arrival_time) - request.arrival_time
    return PromptInfo(request.num_cached_tokens, queued, new.prompt_logprobs)


def _wire(error: PenstockError | None) -> RequestError | None:
    return None if error is None else RequestError(error.code, error.message, error.retry_after)
