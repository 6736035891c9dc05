"""The iteration-level scheduler.

One invariant instead of phases: each request has `num_tokens` and `num_computed_tokens`, and each step computes some of
the difference, within `max_num_batched_tokens` and `max_num_seqs`. Prompts, chunks of prompts, decodes, prefix hits and
recomputation after a preemption are all that one rule.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable
from operator import attrgetter

from penstock.engines.contract.messages import AddRequest, EngineStats, FinishReason, RequestError, RequestOutput
from penstock.engines.contract.step import ModelRunnerOutput, SchedulerOutput
from penstock.engines.errors import DeadlineExceededError, NumericalError, PenstockError
from penstock.engines.scheduler.admission import Admission
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.counters import Counters
from penstock.engines.scheduler.deadlines import Deadlines
from penstock.engines.scheduler.policy import Policy, make_queue
from penstock.engines.scheduler.request import Request, RequestStatus
from penstock.engines.scheduler.samples import samples_of
from penstock.engines.scheduler.tokens import introduce, take_tokens
from penstock.kvcache import KVCacheManager

_BY_KEY = attrgetter("key")
_MAX_RESERVE_SHIFT = 16


class Scheduler:
    """Decides, step by step, which tokens of which requests are computed, and where their keys and values live.

    Plain data driven by one loop: `add` and `abort` between steps, then `schedule`, then `update_from_output` with what
    the runner made of it. Times are passed in (seconds of time.monotonic); the scheduler never asks a clock.

    Requests are in exactly one place: `running` (sorted by key, so that the last one is the one to preempt), the
    waiting queue, or behind their leader as followers, until its prompt is computed.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        *,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self.config = config
        self.kv = kv
        self.running: list[Request] = []
        self.waiting = make_queue(config.policy)
        self.requests: dict[int, Request] = {}
        self._admission = Admission(config, kv.pool.num_blocks, kv.block_size, max_model_len)
        self._deadlines = Deadlines(self.requests.__contains__)
        self._eos = frozenset(eos_token_ids)
        self._num_followers = 0
        self._promised_seats = 0
        """Held for followers whose leader is running."""
        self._scheduled: list[Request] = []
        self._forked: list[Request] = []
        """Running, but the runner has not heard of them yet."""
        self._dropped: list[int] = []
        self._outputs: list[RequestOutput] = []
        self._watermark = max(1, kv.pool.num_blocks // 100)
        """Blocks that an admission leaves free, so that running requests can grow."""
        self._charges = config.policy is Policy.FAIR
        self._counters = Counters(kv.pool.num_blocks)

    # -- requests in -----------------------------------------------------------------------------------------

    def add(self, message: AddRequest) -> None:
        """Queues a request, or ends it with the reason why not. Ids that are in use are ignored."""
        if any(request_id in self.requests for request_id in message.ids):
            return
        self._counters.admitted(len(message.ids))
        error = self._admission.refusal(message, self.num_waiting, self._free_seats)
        if error is not None:
            for request_id in message.ids:
                self._emit_end(request_id, FinishReason.ERROR, error)
            return
        leader, *followers = samples = samples_of(message, self.config, self._eos)
        for request in samples:
            self.requests[request.id] = request
            if request.deadline is not None:
                self._deadlines.add(request.deadline, request.id)
        leader.lead(followers)
        self._num_followers += len(followers)
        self._enqueue(leader)

    def _enqueue(self, request: Request) -> None:
        self.waiting.push(request)
        self._admission.num_waiting_tokens += request.num_tokens

    def _dequeue(self, request: Request) -> None:
        self.waiting.remove(request)
        self._admission.num_waiting_tokens -= request.num_tokens

    def abort(self, ids: Iterable[int], now: float) -> None:
        """Ends requests early. Unknown and finished ids are ignored."""
        for request_id in ids:
            request = self.requests.get(request_id)
            if request is not None:
                self._finish(request, FinishReason.ABORT, now)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + self._num_followers - self._promised_seats

    @property
    def num_waiting_tokens(self) -> int:
        return self._admission.num_waiting_tokens

    @property
    def has_requests(self) -> bool:
        return bool(self.requests)

    @property
    def _free_seats(self) -> int:
        return self.config.max_num_seqs - len(self.running) - self._promised_seats

    # -- a step ----------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput:
        """The next step: running requests first, then as many waiting ones as fit."""
        self._expire(now)
        step = SchedulerOutput(dropped_ids=self._dropped)
        self._dropped = []
        self._scheduled = []
        num_preemptions = self._counters.stats.preemptions
        budget = self._schedule_running(step, self.config.max_num_batched_tokens)
        step.new_requests.extend(map(introduce, self._forked))
        self._forked.clear()
        if self._counters.stats.preemptions == num_preemptions:
            budget = self._schedule_waiting(step, budget, now)
        step.total_num_scheduled_tokens = self.config.max_num_batched_tokens - budget
        if not step.request_ids:
            self._dropped = step.dropped_ids  # nobody executes an empty step: the next one tells the runner
        return step

    def _expire(self, now: float) -> None:
        for request_id in self._deadlines.due(now):
            request = self.requests.get(request_id)
            if request is not None:
                what = "scheduled" if request.first_scheduled is None else "complete"
                error = DeadlineExceededError(f"The request's time was over before it was {what}.")
                self._finish(request, FinishReason.ERROR, now, error)

    def _schedule_running(self, step: SchedulerOutput, budget: int) -> int:
        """Gives every running request its next tokens, preempting from the end of the list where blocks are short."""
        running, scheduled = self.running, self._scheduled
        ids, counts, computed = step.request_ids, step.num_scheduled_tokens, step.num_computed_tokens
        for request in running:  # preemption pops from the end while this loop runs
            start = request.num_computed_tokens
            count = request.num_tokens - start
            if count > 1:  # a prompt, or recomputation: leaves a token of the budget for each one behind it
                count = min(count, budget - (len(running) - len(scheduled) - 1))
            table = request.table
            if table is None or (
                start + count > table.capacity and not self._grow(request, start, start + count, step)
            ):
                break
            scheduled.append(request)
            ids.append(request.id)
            counts.append(count)
            computed.append(start)
            budget -= count
        return budget

    def _grow(self, request: Request, start: int, end: int, step: SchedulerOutput) -> bool:
        """Makes positions start..end-1 writable. False when the request itself had to be preempted."""
        table = request.table
        while table is not None:
            growth = self.kv.grow(table, start, end)
            if growth is not None:
                if growth.block_ids:
                    step.new_block_ids[request.id] = (growth.start, growth.block_ids)
                if growth.copy is not None:
                    step.block_copies.append(growth.copy)
                return True
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is request:
                break
        return False

    def _preempt(self, request: Request, step: SchedulerOutput) -> None:
        """Takes the last running request's blocks away; its tokens will be computed again. Never one of this step's."""
        self.running.pop()
        self._vacate(request, step.dropped_ids)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.prompt_logprobs = []  # a new list: the old one may be on its way to the client
        request.num_preemptions += 1
        self._counters.preempted()
        self._enqueue(request)

    def _schedule_waiting(self, step: SchedulerOutput, budget: int, now: float) -> int:
        """Admits waiting requests in order; stops at the first that does not fit."""
        while budget > 0:
            request = self.waiting.peek()
            if request is None or not self._has_seats(request):
                break
            count = self._admit(request, step, budget)
            if not count:
                break
            self.waiting.pop()
            self._admission.num_waiting_tokens -= request.num_tokens
            if request.first_scheduled is None:
                request.first_scheduled = now
            budget -= count
        return budget

    def _has_seats(self, request: Request) -> bool:
        seats = 1 + len(request.followers)
        return self._free_seats >= min(seats, self.config.max_num_seqs)

    def _admit(self, request: Request, step: SchedulerOutput, budget: int) -> int:
        """Moves a waiting request into `running`: the number of its tokens in this step, 0 if blocks are short.

        All of its known tokens get their blocks now, so that prompts computed in chunks cannot run into each other.
        What it leaves free doubles with each preemption it has suffered, so that it comes back when it can stay.
        """
        shift = min(request.num_preemptions, _MAX_RESERVE_SHIFT)
        reserve = min(self._watermark << shift, self.kv.pool.num_blocks) if self.running else 0
        read_cache = request.params.prompt_logprobs is None and self.config.enable_prefix_caching
        admitted = self.kv.admit(
            request.token_ids,
            adapter=request.adapter,
            salt=request.cache_salt,
            reserve=reserve,
            read_cache=read_cache,
            known_hashes=request.block_hashes,
        )
        if admitted is None:
            return 0
        request.table, cached, copy = admitted
        if copy is not None:
            step.block_copies.append(copy)
        if request.num_preemptions == 0:
            request.num_cached_tokens = cached
            if read_cache:
                self._counters.looked_up(request.num_tokens, cached)
        request.num_computed_tokens = cached
        request.charged_tokens = max(request.charged_tokens, cached)  # hits are free
        return self._start(request, step, budget)

    def _start(self, request: Request, step: SchedulerOutput, budget: int) -> int:
        if request.table is None:
            return 0
        request.status = RequestStatus.RUNNING
        count = min(request.num_tokens - request.num_computed_tokens, budget)
        insort(self.running, request, key=_BY_KEY)
        self._promised_seats += len(request.followers)
        step.new_requests.append(introduce(request))
        step.request_ids.append(request.id)
        step.num_scheduled_tokens.append(count)
        step.num_computed_tokens.append(request.num_computed_tokens)
        self._scheduled.append(request)
        return count

    # -- its result ------------------------------------------------------------------------------------------

    def update_from_output(self, step: SchedulerOutput, result: ModelRunnerOutput, now: float) -> list[RequestOutput]:
        """Takes the tokens in, ends what is complete, and returns what the clients get."""
        outputs = self.take_outputs()
        any_ended = False
        num_prompt_tokens = 0
        for request, count, tokens in zip(
            self._scheduled, step.num_scheduled_tokens, result.sampled_token_ids, strict=True
        ):
            table = request.table
            if table is None or (result.failed and request.id in result.failed):
                self._fail(request, NumericalError(result.failed.get(request.id, "the request lost its blocks")), now)
                outputs.extend(self.take_outputs())
                continue
            start = request.num_computed_tokens
            computed = request.num_computed_tokens = start + count
            if start < request.num_prompt_tokens:
                num_prompt_tokens += min(computed, request.num_prompt_tokens) - start
            if computed >= table.next_publish:
                self.kv.publish(table, request.token_ids, computed)
            if result.prompt_logprobs and request.id in result.prompt_logprobs:
                request.prompt_logprobs.extend(result.prompt_logprobs[request.id])
            if tokens:
                output = take_tokens(request, tokens, result, self._eos)
                outputs.append(output)
                if request.followers:
                    self._fork(request)
                if output.finish_reason is not None:
                    any_ended = True
                    self._counters.finished(output.finish_reason)
                    self._end(request, now)
            if self._charges:
                self.waiting.charge(request)
        if any_ended:
            self.running = [r for r in self.running if r.status is RequestStatus.RUNNING]
        self._counters.stepped(num_prompt_tokens, outputs)
        return outputs

    def _fork(self, leader: Request) -> None:
        """Lets the followers run on the leader's prompt: each computes only the last prompt token anew, for its logits.

        Those that find no seat queue up as requests of their own; the prefix cache will know their prompt.
        """
        followers = leader.dismiss_followers()
        self._num_followers -= len(followers)
        self._promised_seats -= len(followers)
        for request in followers:
            if self._free_seats < 1 or leader.table is None:
                self._enqueue(request)
                continue
            request.num_computed_tokens = request.num_prompt_tokens - 1
            request.charged_tokens = request.num_prompt_tokens
            request.num_cached_tokens = leader.num_cached_tokens
            request.prompt_logprobs = list(leader.prompt_logprobs)
            request.first_scheduled = leader.first_scheduled
            request.table = self.kv.fork(leader.table, request.num_computed_tokens)
            request.status = RequestStatus.RUNNING
            insort(self.running, request, key=_BY_KEY)
            self._forked.append(request)

    def fail_step(self, error: PenstockError, now: float) -> list[RequestOutput]:
        """Ends the requests of the step that raised. The queue stays; the prefix cache, now doubtful, goes."""
        for request in self._scheduled:
            if request.status is RequestStatus.RUNNING:
                self._fail(request, error, now)
        self.kv.pool.clear_cache()
        self._dropped.clear()  # the runner is reset: it has forgotten everybody
        return self.take_outputs()

    def take_outputs(self) -> list[RequestOutput]:
        """Terminal outputs of requests that ended outside of a step: refused, timed out, aborted."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # -- requests out ----------------------------------------------------------------------------------------

    def _fail(self, request: Request, error: PenstockError, now: float) -> None:
        """Ends a request on which a step failed, and its followers: they would only compute the same prompt again."""
        for sample in (*request.followers, request):
            self._finish(sample, FinishReason.ERROR, now, error)

    def _finish(self, request: Request, reason: FinishReason, now: float, error: PenstockError | None = None) -> None:
        """Ends a request wherever it is, and tells its client."""
        leader = request.leader
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif leader is None:
            self._dequeue(request)
        else:
            leader.followers.remove(request)
            self._num_followers -= 1
            self._promised_seats -= leader.status is RequestStatus.RUNNING
        self._end(request, now)
        self._emit_end(request.id, reason, error)

    def _end(self, request: Request, now: float) -> None:
        """The book-keeping of every end. The caller has taken the request out of its list."""
        if request.status is RequestStatus.RUNNING:
            self._vacate(request, self._dropped)
        request.status = RequestStatus.FINISHED
        del self.requests[request.id]
        self._admission.finished(now, idle=not self.requests)
        if request.followers:  # it ended before its prompt was computed: the next sample takes the lead
            leader, *others = request.dismiss_followers()
            leader.lead(others)
            self._num_followers -= 1
            self._enqueue(leader)

    def _vacate(self, request: Request, dropped: list[int]) -> None:
        """Gives a running request's blocks and promised seats back, and lets the runner forget it."""
        if request.table is not None:
            self.kv.free(request.table)
            request.table = None
        self._promised_seats -= len(request.followers)
        if request in self._forked:
            self._forked.remove(request)
        else:
            dropped.append(request.id)

    def _emit_end(self, request_id: int, reason: FinishReason, error: PenstockError | None) -> None:
        self._counters.finished(reason, error)
        wire = None if error is None else RequestError(error.code, error.message, error.retry_after)
        self._outputs.append(RequestOutput(request_id, [], reason, error=wire))

    # -- what operators see ----------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters and gauges of this moment; the same object is updated by the next call."""
        stats, pool = self._counters.snapshot(), self.kv.pool
        stats.num_running = len(self.running)
        stats.num_waiting = self.num_waiting
        stats.num_waiting_tokens = self._admission.num_waiting_tokens
        stats.num_free_blocks = pool.num_free
        stats.num_cached_blocks = pool.num_cached
        return stats
