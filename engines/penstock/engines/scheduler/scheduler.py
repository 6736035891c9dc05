"""The iteration-level scheduler.

One invariant instead of phases: each request has `num_tokens` and `num_computed_tokens`, and each step computes some of
the difference, within `max_num_batched_tokens` and `max_num_seqs`. Prompts, chunks of prompts, decodes, prefix hits,
guesses to verify and recomputation after a preemption all follow from this one rule.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping

import msgspec

from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.messages import AddRequest, FinishReason, RequestOutput
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.step import Drafting, ModelRunnerOutput, SchedulerOutput
from penstock.engines.errors import PenstockError
from penstock.engines.scheduler.admission import Admission
from penstock.engines.scheduler.budget import Background, StepBudget, StepPlan
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.intake import QueueIntake
from penstock.engines.scheduler.pending import NeedsOf, no_needs
from penstock.engines.scheduler.prefetch import Prefetches
from penstock.engines.scheduler.queues import Policy
from penstock.engines.scheduler.request import Request, RequestStatus, Run
from penstock.engines.scheduler.running import RunningRequests, StepUnderWay
from penstock.engines.scheduler.speculation import Speculation
from penstock.engines.scheduler.trials import Trials
from penstock.kvcache import BlockTables, IntegrityError, KVCacheManager, cache_manager, largest_chunk


class Scheduler:
    """Decides, step by step, which tokens of which requests are computed, and where their keys and values live.

    Plain data driven by one loop: `add` and `abort`, then `schedule`, then `update_from_output` with the result of
    the oldest step under way. Times are passed in (seconds of time.monotonic); the scheduler never asks a clock.

    Requests are in exactly one place: `running`, the intake's queue, or behind their leader as followers, until its
    prompt is computed.
    """

    def __init__(self, config: SchedulerConfig, info: ModelInfo, kv: KVCacheManager | None = None) -> None:
        self.config = config
        self.kv = kv or _cache_of(info, config)
        self.running = RunningRequests(self.kv, config.max_num_seqs)
        self.under_way: deque[StepUnderWay] = deque()
        self.trials = Trials()
        chunk = largest_chunk(info.kv_groups, config.max_num_batched_tokens, config.steps_in_flight)
        if info.states is not None:
            chunk = info.states.largest_chunk(chunk, config.steps_in_flight)
        if info.whole_tiles and info.image_grid is not None:
            side = info.image_grid.side
            windows = (group.window for group in info.kv_groups)
            chunk = max(chunk, *([info.image_grid.tokens(side, side)] if side else windows))
        self.info = msgspec.structs.replace(info, chunk=chunk, supports_resume=True)
        self.intake = QueueIntake(config, self.info)
        self.budget = StepBudget(config, chunk)
        self.speculation = Speculation(self.intake, self.running, self.budget)
        self.prefetches = None if self.kv.source is None else Prefetches(self.kv)
        self._background = Background(self.running, self.intake.waiting, self.budget)
        self._admission = Admission(self.intake, self.running, self.kv, self.prefetches, chunk)
        self._charges = config.policy is Policy.FAIR
        self._num_steps = 0
        """Steps scheduled so far."""
        self._num_followers = 0
        self._must_drain = False
        """Blocks are short, and no request can be preempted while steps are under way."""

    # -- requests in -----------------------------------------------------------------------------------------

    def add(self, message: AddRequest, needs_of: NeedsOf = no_needs) -> None:
        """Queues a request, or ends it with an error. Ignores a request with an id that is in use, also that of an
        ended request that steps under way still compute."""
        if self.running.knows_any(message.ids):
            return
        samples = self.intake.receive(message, self.num_waiting, self.running.num_free_seats, needs_of)
        if samples:
            leader, *followers = samples
            if self.speculation.guesses_for_all or leader.params.prediction or leader.grammar is not None:
                self.speculation.follow(samples)
            leader.lead(followers)
            self._num_followers += len(followers)
            self.intake.enqueue(leader)

    def abort(self, ids: Iterable[int], now: float) -> None:
        """Ends requests early. Unknown and finished ids are ignored."""
        for request_id in ids:
            request = self.intake.requests.get(request_id)
            if request is not None:
                self._finish(request, FinishReason.ABORT, now)

    @property
    def num_waiting(self) -> int:
        return self.intake.num_waiting + self._num_followers

    @property
    def is_short_of_blocks(self) -> bool:
        """When waiting requests were last looked at, the next one needed more blocks than were free."""
        return self._admission.short_of_blocks

    @property
    def has_requests(self) -> bool:
        return bool(self.intake.requests)

    @property
    def has_work(self) -> bool:
        """Whether steps would do something. False while all requests wait for something other than a step."""
        return bool(self.under_way or self.running.runs) or self.intake.can_go_on

    # -- a step ----------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput:
        """The next step: running requests first, then as many waiting ones as fit. It is under way from now on, unless
        it is empty."""
        for request, error in self.intake.due(now):
            self._finish(request, FinishReason.ERROR, now, error)
        self.kv.pool.expire(now)
        new = StepUnderWay(self._num_steps + 1, scheduled_at=now)
        step = new.step
        if self.under_way and (self._must_drain or self.trials):
            return step
        self._must_drain = False
        if self.trials:
            self._schedule_trial(new)
        if not self.trials:
            self._schedule_all(new, now)
        if step.request_ids:
            self.running.tell(step, new.runs)
            step.block_saves = self.kv.take_saves()
            new.complete()
            new.expected_seconds = self.budget.pace.seconds(step.total_num_scheduled_tokens, new.attended)
            self.under_way.append(new)
            self._num_steps += 1
        return step

    def _schedule_trial(self, new: StepUnderWay) -> None:
        """The next group of suspects that has anything to compute."""
        while self.trials and not new.runs:
            suspects = set(self.trials.suspects)
            ready, prompts = self.running.ready()
            ready = [run for run in ready if run in suspects]
            prompts = [entry for entry in prompts if entry[0] in suspects]
            self._schedule_running(new, ready, self.budget.plan(ready, prompts, self.running.runs, None))
            if not new.runs:
                self.trials.acquit()

    def _schedule_all(self, new: StepUnderWay, now: float) -> None:
        self.intake.requeue_unblocked()
        if self.running.num_free_seats < 1:
            self._displace_background()
        num_preemptions = self.intake.stats.preemptions
        ready, prompts = self.running.ready(background=self._background.may_compute(now))
        short, crowded = self._background.has_short_steps(now), False
        if ready and ready[0].request.background:
            if self.under_way:
                return  # so a request that arrives now waits for one step, not for two
            if short:
                first = self._background.first(ready)
                crowded, ready = len(first) < len(ready), first
                prompts = [entry for entry in prompts if entry[0] in first]
        if self.speculation.in_use and self.under_way and self.speculation.holds_back(ready, self.under_way[-1]):
            return
        head = self.intake.waiting.peek() if self.running.num_free_seats > 0 else None
        if head is not None and head.background and (crowded or self.running.has_others):
            head = None
        plan = self.budget.plan(ready, prompts, self.running.runs, head, short=short)
        self._schedule_running(new, ready, plan)
        if not plan.prompt_tokens or self._must_drain or self.intake.stats.preemptions != num_preemptions:
            return
        room = self.config.max_num_batched_tokens - sum(new.step.num_scheduled_tokens)
        left = min(plan.prompt_tokens - sum(plan.shares.values()), room)
        left = self._admission.schedule(new, left, now)
        while self._admission.short_of_blocks and self._displace_background():
            left = self._admission.schedule(new, left, now)
        if left > 0:
            new.top_up(left, self.budget.chunk)

    def _displace_background(self) -> bool:
        """Preempts the last request if it is in the background and the next one that waits is not. False when there is
        none, or when that must wait until no step is under way."""
        head = self.intake.waiting.peek()
        if head is None or head.background or not self.running.has_background:
            return False
        if self.under_way:
            self._must_drain = True
            return False
        self._preempt()
        return True

    def _schedule_running(self, new: StepUnderWay, ready: list[Run], plan: StepPlan) -> None:
        """Gives running requests their next tokens, preempting from the end of the list where blocks are short. Those
        without a share in the plan get one token."""
        shares = plan.shares
        if not shares:
            new.include_decodes(self._with_blocks(ready, shares, new.step))
        else:
            for run in self._with_blocks([run for run in ready if shares.get(run.id, 1)], shares, new.step):
                new.include(run, shares.get(run.id, 1))
        if self.speculation.in_use:
            self.speculation.extend(new, plan)

    def _with_blocks(self, ready: list[Run], shares: Mapping[int, int], step: SchedulerOutput) -> list[Run]:
        """Those of `ready` that have blocks for their next tokens."""
        if shares:
            short = [run for run in ready if run.num_computed_tokens + shares.get(run.id, 1) > run.tables.capacity]
        else:
            short = [run for run in ready if run.num_computed_tokens >= run.tables.capacity]
        for run in short:
            if run.has_seat and not self._make_room(run, shares.get(run.id, 1), step) and self._must_drain:
                return ready[: ready.index(run)]
        return [run for run in ready if run.has_seat] if short else ready

    def _make_room(self, run: Run, count: int, step: SchedulerOutput) -> bool:
        """Makes the next `count` positions writable. False when the request had to be preempted itself, or when that
        must wait until no step is under way."""
        while not self.running.grow(run, count, step):
            if self.under_way:
                self._must_drain = True
                return False
            last = self._preempt()
            last.request.num_shortages += 1
            if last is run:
                return False
        return True

    def _preempt(self) -> Run:
        """Takes the last request's blocks away; its tokens will be computed again. No step is under way."""
        run = self.running.stop_last()
        request = run.request
        request.status = RequestStatus.PREEMPTED
        request.prompt_logprobs = []  # a new list: the old one may be on its way to the client
        request.num_preemptions += 1
        self.intake.stats.preemptions += 1
        self.intake.enqueue(request)
        return run

    # -- its result ------------------------------------------------------------------------------------------

    def update_from_output(self, result: ModelRunnerOutput, now: float, seconds: float | None = None) -> None:
        """Takes in the tokens of the oldest step under way, and ends the requests that are complete; `take_outputs`
        then returns what clients get. `seconds`: what the step took on the device, if that was measured."""
        done = self._oldest_succeeded(seconds, result.drafting)
        step = done.step
        num_live, num_prompt_tokens, num_sampled = len(self.intake.requests), 0, 0
        failed, logprobs, eos = result.failed, result.logprobs, self.intake.eos
        outputs: list[RequestOutput] = []
        columns = zip(
            done.runs, step.num_scheduled_tokens, step.num_computed_tokens, result.sampled_token_ids, strict=True
        )
        for index, (run, count, start, tokens) in enumerate(columns):
            if not run.has_seat:
                self.running.vacate(run)
                continue
            request, tables, output = run.request, run.tables, None
            if failed and request.id in failed:
                self._fail(request, failed[request.id], now)
                continue
            computed = start + count
            if start < request.num_prompt_tokens:
                num_new = min(computed, request.num_prompt_tokens) - start
                num_prompt_tokens += num_new
                if request.chunks is not None:
                    request.trace(done.scheduled_at, now, num_new)
                if request.id in result.prompt_logprobs:
                    request.prompt_logprobs.extend(result.prompt_logprobs[request.id])
            if tokens:
                output = request.append(tokens, eos)
                num_sampled += len(output.token_ids)
                if request.looks_ahead:
                    computed = self.speculation.take_in(done, index, output, result)
                if logprobs and request.id in logprobs:
                    output.logprobs = logprobs[request.id][: len(output.token_ids)]
            elif request.id in result.pooled:
                output = _pooled_output(request, result.pooled[request.id])
            if computed >= tables.next_publish:
                self.kv.publish(tables, request.token_ids, computed)
            if request.followers and computed >= request.num_prompt_tokens:
                self._fork(request, tables)
            if computed >= tables.next_trim:
                self.kv.trim(tables, computed)
            if self._charges:
                self.intake.waiting.charge(request, computed)
            if output is not None:
                outputs.append(output)
                if output.finish_reason is not None:
                    self._end(request, now)
        self.intake.emit(outputs)
        if num_live != len(self.intake.requests):
            self.running.sweep()
        self.intake.stepped(num_prompt_tokens, num_sampled)

    def _oldest_succeeded(self, seconds: float | None, drafting: Drafting | None) -> StepUnderWay:
        """The oldest step, which is not under way any more."""
        done = self.under_way.popleft()
        self.running.last_collected = done.number
        if seconds is not None:
            num_tokens = done.step.total_num_scheduled_tokens
            if drafting is not None:
                num_tokens, seconds = self.speculation.without_drafting(done.step, drafting, seconds)
            self.budget.pace.observe(num_tokens, done.attended, seconds)
        if self.trials:
            self.trials.succeeded()
        if done.step.block_copies:
            self.running.copied(done.runs)
        if done.step.block_loads:
            self.running.loaded(done.runs)
        return done

    def _fork(self, leader: Request, tables: BlockTables) -> None:
        """Lets the followers run on the leader's prompt: each computes only the last prompt token again, for its
        logits, or with recurrent layers what follows the last checkpoint before that.

        Those that find no seat are queued as requests of their own; the prefix cache will know their prompt.
        """
        self.running.sweep()
        followers = leader.dismiss_followers()
        self._num_followers -= len(followers)
        for request in followers:
            if self.running.num_free_seats < 1:
                self.intake.enqueue(request)
                continue
            start = self.kv.checkpoint_before(tables, request.num_prompt_tokens - 1)
            request.charged_tokens = request.num_prompt_tokens
            request.num_cached_tokens = leader.num_cached_tokens
            request.first_scheduled = leader.first_scheduled
            forked, request.chains = self.kv.fork(tables, start)
            self.running.start(request, forked, start)

    def take_outputs(self) -> list[RequestOutput]:
        """What clients get, of everything since the last call."""
        return self.intake.take_outputs()

    # -- a step that raised ----------------------------------------------------------------------------------

    def step_failed(self, failed: StepUnderWay, error: PenstockError, now: float) -> None:
        """The step `failed` raised: the runner has lost all steps under way, and forgotten all requests.

        The requests of `failed` are run again in halves, until the one that makes it fail is alone and ends with the
        error. Everything that was computed before stays, also the prefix cache.
        """
        self.intake.stats.step_failures += 1
        lost = dict.fromkeys(run for step in self.under_way for run in step.runs)
        self.running.last_collected = self._num_steps
        while self.under_way:
            self.under_way.pop().rewind()
        for run in lost:
            if run.has_seat:
                start = run.num_computed_tokens = self.kv.rewind(run.tables, run.num_computed_tokens)
                run.request.prompt_logprobs = run.request.prompt_logprobs[:start]  # the rest comes again
        self.running.lost(lost)
        ends = {run: end for run, end in zip(failed.runs, failed.ends, strict=True) if run.has_seat}
        if len(failed.runs) > 1:  # even if one is left: the one that made it fail may be gone
            self.trials.divide(ends)
            return
        self.trials.convict()
        for run in ends:
            self._fail(run.request, error, now)

    # -- requests out ----------------------------------------------------------------------------------------

    def _fail(self, request: Request, error: PenstockError, now: float) -> None:
        """Ends a request on which a step failed, and its followers: they would only compute the same prompt again."""
        for sample in (*request.followers, request):
            self._finish(sample, FinishReason.ERROR, now, error)

    def _finish(self, request: Request, reason: FinishReason, now: float, error: PenstockError | None = None) -> None:
        """Ends a request wherever it is, and tells its client."""
        leader, has_seat = request.leader, request.run is not None
        if leader is not None:
            leader.followers.remove(request)
            request.leader = None
            self._num_followers -= 1
        elif not has_seat:
            self.intake.withdraw(request)
        self._end(request, now)
        if has_seat:
            self.running.sweep()
        self.intake.emit_end(request.id, reason, error)

    def _end(self, request: Request, now: float) -> None:
        """Does what every end needs. The caller takes the request out of its list."""
        if request.run is not None:
            self.running.stop(request.run)
        if request.retention is not None and request.chains is not None:
            self.kv.keep(request.chains, request.num_prompt_tokens, request.retention, now)
        if self.prefetches is not None:
            self.prefetches.drop(request)
        self.intake.ended(request, now)
        if request.followers:  # it ended before its prompt was computed: the next sample takes the lead
            leader, *rest = request.dismiss_followers()
            leader.params = request.params  # if the prompt's logprobs are wanted, they come with this one
            leader.lead(rest)
            self._num_followers -= 1
            self.intake.enqueue(leader)

    # -- what operators see ----------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters and gauges of this moment; the same object is updated by the next call."""
        stats, pool, rows = self.intake.snapshot(), self.kv.pool, self.kv.rows
        stats.num_running = len(self.running.runs)
        stats.num_waiting = self.num_waiting
        stats.num_free_blocks = pool.num_free
        stats.num_cached_blocks = pool.num_cached
        if rows is not None:
            stats.num_state_rows, stats.num_free_state_rows = rows.num_blocks, rows.num_free
        return stats

    def check_idle(self) -> None:
        """Where nothing runs, at the cost of a few comparisons: raises IntegrityError if anything is left."""
        if not self.kv.is_idle:
            raise IntegrityError("blocks leaked")
        if self.running.runs or self.num_waiting or self.intake.num_waiting_tokens:
            raise IntegrityError("a request is lost, or waiting ones are miscounted")


def _cache_of(info: ModelInfo, config: SchedulerConfig) -> KVCacheManager:
    caching = config.enable_prefix_caching
    return cache_manager(info.num_blocks, info.kv_groups, info.states, enable_prefix_caching=caching)


def _pooled_output(request: Request, vector: list[float]) -> RequestOutput:
    """What a pooling request gets of the runner's vector."""
    length = math.hypot(*vector)
    if request.pooling is not None and request.pooling.normalize and length:
        vector = [number / length for number in vector]
    return RequestOutput(request.id, [], FinishReason.STOP, prompt=request.prompt_info, pooled=vector)
