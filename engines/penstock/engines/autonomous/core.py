"""The admission queue in front of an engine with a scheduler of its own, and the seats that it gives there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from penstock.engines.adapter_loading import adapter_loader
from penstock.engines.contract.continuous_batcher import BatcherOutput, ContinuousBatcher, NewTokens, StartRequest
from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.messages import (
    AbortRequests,
    AddRequest,
    CallReply,
    DownMessage,
    FinishReason,
    Inspect,
    PromptInfo,
    RequestError,
    RequestOutput,
    ResetPrefixCache,
    StepOutputs,
    StepRecord,
)
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.step_ring import StepRing
from penstock.engines.errors import (
    EngineError,
    InvalidRequestError,
    PenstockError,
    StepFailedError,
    UnsupportedError,
)
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.intake import QueueIntake
from penstock.engines.scheduler.request import Request, RequestStatus
from penstock.engines.scheduler.view import queue_view
from penstock.kvcache.integrity import require

logger = logging.getLogger(__name__)


class AutonomousCore:
    """Implements Core over a ContinuousBatcher.

    Which requests wait, how long and in which order is decided here, by the same policies and bounds as for model
    runners; the batcher only ever holds what it can run now. Once handed over, a request is under the engine's own
    scheduler.
    """

    def __init__(self, batcher: ContinuousBatcher, config: SchedulerConfig, clock: Callable[[], float]) -> None:
        """Raises UnsupportedError for speculative decoding: the engine has its own settings for it."""
        if config.speculative != "off":
            raise UnsupportedError("--speculative needs Penstock's scheduler; for this engine use engine_args.")
        info = batcher.info
        self.batcher = batcher
        self.config = config
        self.broken = False
        self.intake = QueueIntake(config, info)
        self.adapters = adapter_loader(batcher, self.intake, clock)
        self.seats = BatcherSeats(config.max_num_seqs, info.num_blocks, info.block_size)
        self._aborting: list[int] = []
        """Running requests that have just been aborted; the batcher is told of all of them at once."""
        self._last_sign = 0.0
        """When the batcher last reported anything about the requests that it holds."""
        self.ring = StepRing()
        self._clock = clock

    @property
    def info(self) -> ModelInfo:
        return self.batcher.info

    @property
    def wakeups(self) -> Sequence[int]:
        own = self.batcher.wakeup
        return self.adapters.wakeups if own is None else (own, *self.adapters.wakeups)

    @property
    def has_work(self) -> bool:
        """Never for an engine that runs by itself: `wakeup` tells when there is something to fetch."""
        if self.batcher.wakeup is not None or self.broken:
            return False
        return self.seats.num_taken > 0 or self.intake.can_go_on

    @property
    def next_look(self) -> float | None:
        looks = (self.intake.next_deadline, self.adapters.next_look)
        return min((look for look in looks if look is not None), default=None)

    expected_seconds: float | None = None

    @property
    def quiet_since(self) -> float | None:
        """An engine that runs by itself may hang while its process goes on answering."""
        return self._last_sign if self.seats.num_taken else None

    def close(self) -> None:
        self.adapters.close()
        self.batcher.close()

    def step(self, messages: Iterable[DownMessage]) -> StepOutputs:
        """Takes in messages, hands over what fits, and fetches what has come: one iteration of the engine, unless it
        runs by itself."""
        started = self._clock()
        replies: list[CallReply] = []
        records: list[StepRecord] = []
        try:
            replies += self._receive(messages, started)
            replies += self.adapters.advance() if self.adapters.under_way else ()
            for request, error in self.intake.due(started):
                self._give_up(request, FinishReason.ERROR, started, error)
            if self.batcher.wakeup is None:
                self._hand_over(started)
                records += self._advance(started)
            else:
                self._take_in(self.batcher.step())
                self._hand_over(started)
        except Exception:
            logger.exception("the engine failed with %d requests", self.seats.num_taken)
            self._break()
        return StepOutputs(self.intake.take_outputs(), self.stats(), records, replies)

    # -- requests in -----------------------------------------------------------------------------------------

    def _receive(self, messages: Iterable[DownMessage], now: float) -> list[CallReply]:
        """Returns the replies that are due at once."""
        replies: list[CallReply] = []
        for message in messages:
            if isinstance(message, AddRequest):
                self._add(message)
            elif isinstance(message, AbortRequests):
                for request_id in message.ids:
                    if request_id in self.intake.requests:
                        self._give_up(self.intake.requests[request_id], FinishReason.ABORT, now)
            elif isinstance(message, ResetPrefixCache):
                replies.append(self._reset_prefix_cache(message))
            elif isinstance(message, Inspect):
                view = queue_view(self.intake, self.seats.running.values(), self.seats.count, now)
                replies.append(CallReply(message.call, view=view))
            else:
                replies += self.adapters.receive(message)
        return replies

    def _reset_prefix_cache(self, message: ResetPrefixCache) -> CallReply:
        try:
            self.batcher.reset_prefix_cache()
        except PenstockError as error:
            return CallReply(message.call, RequestError.of(error))
        return CallReply(message.call)

    def _add(self, message: AddRequest) -> None:
        """Queues the samples, or ends them with the reason why not. Ids that are in use are ignored."""
        if not any(i in self.seats.aborted for i in message.ids):
            for request in self.intake.receive(
                message, self.intake.num_waiting, self.seats.num_free, self.adapters.needs_of
            ):
                self.intake.enqueue(request)

    # -- to the batcher and back -----------------------------------------------------------------------------

    def _hand_over(self, now: float) -> None:
        """Tells the batcher whom it may forget, and hands it those that it can run now, in order."""
        if self._aborting:
            ids, self._aborting = self._aborting, []
            self.batcher.abort(ids)
        self.intake.requeue_unblocked()
        if not len(self.intake.waiting):
            return
        num_free_blocks = self.batcher.num_free_blocks
        while (request := self.intake.waiting.peek()) is not None:
            if (pending := request.pending) is not None:
                self.intake.pass_by(request, pending)
                continue
            if not self.seats.fits(request, num_free_blocks):
                break
            self.intake.pop()
            # the whole prompt: what of it the engine has cached it says too late
            self.intake.waiting.charge(request, request.num_prompt_tokens)
            request.first_scheduled = now
            try:
                self.batcher.start(start_message(request))
            except (PenstockError, ValueError) as error:
                self.intake.ended(request, now)
                known = error if isinstance(error, PenstockError) else InvalidRequestError(str(error))
                self.intake.emit_end(request.id, FinishReason.ERROR, known)
                continue
            if not self.seats.num_taken:
                self._last_sign = now
            request.status = RequestStatus.RUNNING
            self.seats.take(request)

    def _advance(self, started: float) -> list[StepRecord]:
        num_requests = self.seats.num_taken
        if not num_requests:
            return []
        waiting, free_blocks = self.intake.num_waiting, self.batcher.num_free_blocks
        # how many tokens it takes the batcher says only when it has them
        self.ring.begins(started, num_requests, 0, num_requests, waiting, free_blocks)
        result = self.batcher.step()
        self.ring.ends(self._clock() - started)
        self._take_in(result)
        if not result.num_scheduled_tokens:
            return []
        return [StepRecord(self._clock() - started, num_requests, result.num_scheduled_tokens)]

    def _take_in(self, result: BatcherOutput) -> None:
        now = self._clock()
        if result.tokens or result.released or result.num_scheduled_tokens:
            self._last_sign = now
        num_prompt_tokens = num_sampled = 0
        for new in result.tokens:
            request = self.seats.running.get(new.id)
            if request is None:
                if new.finish_reason is not None:  # it ended by itself before the abort could reach it
                    self.seats.leave(new.id)
            elif new.token_ids or new.finish_reason is not None:
                prompt = None
                if request.id in self.seats.promised:
                    self.seats.has_blocks(request.id)
                    if new.finish_reason is not FinishReason.ERROR:
                        prompt = self._prompt_computed(request, new)
                        num_prompt_tokens += request.num_prompt_tokens - prompt.num_cached_tokens
                num_sampled += len(new.token_ids)
                self._take_tokens(request, new, prompt, now)
        for request_id in result.released:
            if request_id in self.seats.aborted:
                self.seats.leave(request_id)
        if result.num_preemptions:
            self.intake.stats.preemptions += result.num_preemptions
            self.seats.preempted()
        if result.tokens or result.num_scheduled_tokens:
            self.intake.stepped(num_prompt_tokens, num_sampled)

    def _prompt_computed(self, request: Request, new: NewTokens) -> PromptInfo:
        """What the first tokens tell of the prompt."""
        request.num_cached_tokens = new.num_cached_tokens
        request.prompt_logprobs = new.prompt_logprobs or []
        if not request.scores_prompt and self.config.enable_prefix_caching:
            self.intake.looked_up(request.num_prompt_tokens, new.num_cached_tokens)
        return request.prompt_info

    def _take_tokens(self, request: Request, new: NewTokens, prompt: PromptInfo | None, now: float) -> None:
        output = RequestOutput(
            request.id, new.token_ids, new.finish_reason, new.stop_token_id, new.logprobs, prompt=prompt
        )
        request.num_tokens += len(new.token_ids)
        if new.finish_reason is not FinishReason.ERROR:
            # the newest token is not computed, only sampled
            self.intake.waiting.charge(request, max(request.num_prompt_tokens, request.num_tokens - 1))
        elif new.error is not None:
            output.error = RequestError.of(new.error)
        else:
            output.error = RequestError.of(EngineError("The engine failed on this request."))
        self.intake.emit([output])
        if new.finish_reason is not None:
            self.seats.leave(request.id)
            self.intake.ended(request, now)

    def _break(self) -> None:
        """Ends what the batcher held. Those that wait are the gateway's: this process must go."""
        self.broken = True
        error = StepFailedError("The engine failed on this request.")
        for request in list(self.seats.running.values()):
            self.seats.leave(request.id)
            self.intake.ended(request, self._clock())
            self.intake.emit_end(request.id, FinishReason.ERROR, error)

    # -- requests out ----------------------------------------------------------------------------------------

    def _give_up(self, request: Request, reason: FinishReason, now: float, error: PenstockError | None = None) -> None:
        """Ends a request for its client, wherever it is."""
        if request.status is RequestStatus.RUNNING:
            self.seats.abort(request.id)
            self._aborting.append(request.id)
        else:
            self.intake.withdraw(request)
        self.intake.ended(request, now)
        self.intake.emit_end(request.id, reason, error)

    # -- what operators see ----------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters and gauges of this moment; the same object is updated by the next call."""
        stats = self.intake.snapshot()
        stats.num_running = self.seats.num_taken
        stats.num_waiting = self.intake.num_waiting
        stats.num_free_blocks = 0 if self.broken else self.batcher.num_free_blocks
        return stats

    def check_integrity(self) -> None:
        """Raises IntegrityError when queue, seats and promises contradict one another."""
        intake, seats = self.intake, self.seats
        waiting = list(intake)
        intake.check_integrity()
        require(len(waiting) + len(seats.running) == len(intake.requests), "a request is lost")
        require(not seats.aborted & intake.requests.keys(), "an aborted request is still live")
        require(seats.num_taken <= self.config.max_num_seqs, "more requests than seats")
        require(sum(seats.promised.values()) == seats.num_promised_blocks, "promised blocks miscounted")
        require(seats.promised.keys() <= seats.running.keys() | seats.aborted, "blocks promised to nobody")


def start_message(request: Request) -> StartRequest:
    """All that a batcher must know of a request."""
    return StartRequest(
        request.id,
        list(request.token_ids),  # other samples may have that one, too
        request.params,
        None if request.params.seed is None else request.seed,
        request.priority,
        request.cache_salt,
        request.adapter,
    )


class BatcherSeats:
    """Requests that were handed over. A seat stays taken until the batcher says that its request is gone.

    A batcher gives a prompt its blocks some time after it was handed over, and an engine that runs by itself says so
    later still. So the blocks of a prompt count as promised until its first token proves that it has them.
    """

    def __init__(self, count: int, num_blocks: int, block_size: int) -> None:
        self.count = count
        self.running: dict[int, Request] = {}
        self.aborted: set[int] = set()
        """Ended for their clients, but not yet released by the batcher."""
        self.promised: dict[int, int] = {}
        """Id -> blocks of a prompt without a first token, aborted ones included: they may be in the middle of it."""
        self.num_promised_blocks = 0
        self._block_size = block_size
        self._watermark = max(1, num_blocks // 100)
        """Blocks that stay free, so that running requests can grow."""
        self._contended = False

    @property
    def num_taken(self) -> int:
        return len(self.running) + len(self.aborted)

    @property
    def num_free(self) -> int:
        return self.count - self.num_taken

    def fits(self, request: Request, num_free_blocks: int) -> bool:
        """`num_free_blocks` as the batcher says. Alone with the engine a request always fits."""
        if not self.num_taken:
            return True
        if self._contended or not self.num_free:
            return False
        return num_free_blocks - self.num_promised_blocks - self._blocks_of(request) >= self._watermark

    def _blocks_of(self, request: Request) -> int:
        return -(-request.num_prompt_tokens // self._block_size)

    def take(self, request: Request) -> None:
        self.running[request.id] = request
        blocks = self.promised[request.id] = self._blocks_of(request)
        self.num_promised_blocks += blocks

    def has_blocks(self, request_id: int) -> None:
        """Its prompt is computed."""
        self.num_promised_blocks -= self.promised.pop(request_id, 0)

    def preempted(self) -> None:
        """Running requests ran out of blocks. Until one of them ends, what is free belongs to those that had to go."""
        self._contended = True

    def abort(self, request_id: int) -> None:
        del self.running[request_id]
        self.aborted.add(request_id)

    def leave(self, request_id: int) -> None:
        """A request has ended by itself, or an aborted one is gone. Unknown ids are ignored."""
        if self.running.pop(request_id, None) is None and request_id not in self.aborted:
            return
        self.aborted.discard(request_id)
        self.has_blocks(request_id)
        self._contended = False
