"""One replica: the engine's scheduler and KV cache on a timeline that is only counted.

It goes through the same iterations as `penstock.engines.core.EngineCore`: requests in, steps submitted until as many
are under way as may be, the oldest one's result. The device is the simulated engine's: a step begins when it was
submitted or when the one before it ended, whichever is later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from itertools import count

import msgspec

from penstock.engines.client.stream import RequestStream
from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.messages import AddRequest, FinishReason, RequestError, RequestOutput
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.contract.step import ModelRunnerOutput
from penstock.engines.errors import EngineDeadError, NotReadyError
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.engines.scheduler.running import StepUnderWay
from penstock.engines.simulated import LatencyModel
from penstock.kvcache import BlockHash, BlockHasher, KVCacheManager
from penstock.planning.clock import EventQueue
from penstock.planning.flight import Flight, Gaps, Prompt
from penstock.planning.leaping import TOKEN, LeapingScheduler


class StepModel(LatencyModel, frozen=True, kw_only=True):
    """The simulated engine's latency model, and what attention adds to it, which a real engine has."""

    per_attended_token: float = 0.0
    """For each token of the context that a token of the step attends to, summed over the step's tokens."""

    def seconds(self, num_sequences: int, num_tokens: int, attended: float) -> float:
        return self.step_seconds(num_sequences, num_tokens) + self.per_attended_token * attended

    def scaled(self, **factors: float) -> StepModel:
        """With some of its terms multiplied."""
        return msgspec.structs.replace(self, **{name: getattr(self, name) * by for name, by in factors.items()})


_BYTES = 8


class QuickHasher(BlockHasher):
    """64 bits of Python's own hash in place of keyed BLAKE2b."""

    def block(self, parent: BlockHash, token_ids: Sequence[int], attached: bytes = b"") -> BlockHash:
        return hash((parent, tuple(token_ids), attached)).to_bytes(_BYTES, "little", signed=True)


class _Held:
    """A request that the replica has."""

    __slots__ = ("begun", "flight", "stream", "unsent")

    def __init__(self, stream: RequestStream, flight: Flight) -> None:
        self.stream = stream
        self.flight = flight
        self.begun = False
        """The gateway knows that its prompt is computed."""
        self.unsent = 0
        """Tokens that the gateway has not been told of: none looks at them before the request ends, or moves."""


class PlannedEngine:
    """What `penstock.engines.replicas` asks of an Engine, and a replica's life: it starts, serves, drains, dies."""

    failed = False

    def __init__(
        self, info: ModelInfo, config: SchedulerConfig, model: StepModel, events: EventQueue, gaps: Gaps
    ) -> None:
        self.info = info
        self.ready = False
        self.stats = EngineStats(num_blocks=info.num_blocks)
        self.busy_seconds = 0.0
        self.on_idle: Callable[[], None] | None = None
        """Called when nothing is left to do."""
        self.on_error: Callable[[Sequence[Flight]], None] | None = None
        """Called with those that the engine has refused: they may have ended, or be elsewhere."""
        self.may_leap = True
        self._config = config
        self._model = model
        self._events = events
        self._gaps = gaps
        self._ids = count(1)
        self._life = 0
        self._prefix_hits = self._prefix_queries = self._preemptions = 0
        """Of earlier lives."""
        self._scheduler: LeapingScheduler | None = None
        self._longest_prompt = 0
        self._reset()

    def _reset(self) -> None:
        self._life += 1
        self._inbox: list[AddRequest] = []
        self._held: dict[int, _Held] = {}
        self._sent = 0
        self._free_at = 0.0
        """When the device has done all that was taken in."""
        self._last_collected = 0.0
        self._equal_steps = 0
        """How many results may be taken in at once; 0: the next event is the oldest step's end."""
        self._wakes = 0
        """Number of the newest event: earlier ones mean nothing any more."""
        self._waits = False
        """An event is to come."""

    # -- its life --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """It has loaded its model, with an empty KV cache."""
        kv = KVCacheManager(
            self.info.num_blocks,
            self.info.kv_groups,
            enable_prefix_caching=self._config.enable_prefix_caching,
            hasher=QuickHasher(),
        )
        self._scheduler = LeapingScheduler(self._config, self.info, kv)
        self.stats = copy(self._scheduler.stats())
        self.ready = True

    @property
    def alive(self) -> bool:
        return self._scheduler is not None

    @property
    def flights(self) -> list[Flight]:
        """Requests that it has."""
        return [held.flight for held in self._held.values()]

    @property
    def idle(self) -> bool:
        return not self._held

    def die(self) -> None:
        """Everything that it held is gone; those that waited for it are told."""
        self._leap(self._equal_ends())
        self._stop()
        lost, self._held = list(self._held.items()), {}
        error = RequestError.of(EngineDeadError("The replica died."))
        for request_id, held in lost:
            self._held[request_id] = held
            self._send(held, RequestOutput(request_id, [], FinishReason.ERROR, error=error), self._events.now)
        self._reset()

    def stop(self) -> None:
        """It is idle and goes away."""
        self._stop()
        self._reset()

    def _stop(self) -> None:
        hits, queries, preemptions = self.totals
        self._prefix_hits, self._prefix_queries, self._preemptions = hits, queries, preemptions
        self._scheduler = None
        self.ready = False
        self.stats = EngineStats(num_blocks=self.info.num_blocks)

    @property
    def totals(self) -> tuple[int, int, int]:
        """Prompt tokens found in the prefix cache, those looked up, and preemptions, of all its lives."""
        stats = EngineStats() if self._scheduler is None else self._scheduler.stats()
        return (
            self._prefix_hits + stats.prefix_hits,
            self._prefix_queries + stats.prefix_queries,
            self._preemptions + stats.preemptions,
        )

    @property
    def kv_use(self) -> float:
        """Share of the blocks that requests hold, as of the newest step."""
        return 1.0 - self.stats.num_free_blocks / self.stats.num_blocks if self.alive else 0.0

    # -- what a gateway asks ---------------------------------------------------------------------------------

    def new_ids(self, number: int) -> tuple[int, ...]:
        return tuple(next(self._ids) for _ in range(number))

    def submit(self, requests: Sequence[AddRequest]) -> RequestStream:
        if not self.ready:
            raise NotReadyError("The replica is not there.")
        stream = RequestStream((i for request in requests for i in request.ids), self.abort)
        for request in requests:
            prompt = request.prompt_token_ids
            if not isinstance(prompt, Prompt):
                raise TypeError("a prompt without its request")
            self._longest_prompt = max(self._longest_prompt, len(prompt))
            self._held.update((request_id, _Held(stream, prompt.flight)) for request_id in request.ids)
            self._sent += len(request.ids)
        stream.arrival_number = self._sent
        self._inbox += requests
        self._look()
        return stream

    def abort(self, ids: Sequence[int]) -> None:
        """Nobody gives up here: clients wait for their answers."""
        raise NotImplementedError

    # -- iterations ------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """A message has come: an idle engine takes it in at once, one that computes when the step under way ends."""
        if not self._waits:
            self._wake(self._events.now)
        elif self._equal_steps:
            self._wake(self._end_of_current())

    def _wake(self, when: float) -> None:
        self._waits = True
        self._wakes += 1
        self._events.at(when, self._awake(self._life, self._wakes))

    def _awake(self, life: int, number: int) -> Callable[[], None]:
        def awake() -> None:
            if (life, number) == (self._life, self._wakes):
                self._waits = False
                self._iterate()

        return awake

    def _iterate(self) -> None:
        """At the end of a step, or when a message finds the engine idle."""
        scheduler = self._scheduler
        if scheduler is None:
            return
        if scheduler.under_way:
            self._leap(self._equal_ends()[:-1])  # behind the last one a new request may be planned for
            self._collect(scheduler)
        inbox, self._inbox = self._inbox, []
        for request in inbox:
            scheduler.add(request)
        now, depth = self._events.now, self._config.steps_in_flight
        while len(scheduler.under_way) < depth and scheduler.schedule(now).request_ids:
            pass
        if scheduler.under_way:
            self._compute(scheduler)
            return
        self._deliver(scheduler, now, None)
        if self.idle and self.on_idle is not None:
            self.on_idle()

    def _compute(self, scheduler: LeapingScheduler) -> None:
        oldest = scheduler.under_way[0]
        self._free_at = max(self._free_at, oldest.scheduled_at)
        # what routing looks at must not be older than it would be: leaps end before blocks could be short
        spare = -(-self._longest_prompt // self.info.block_size)
        self._equal_steps = scheduler.num_equal_steps(spare) if self.may_leap else 0
        steps = self._equal_steps or 1
        self._wake(self._free_at + steps * self._seconds(oldest) + self._growth(oldest) * steps * (steps - 1) / 2)

    def _seconds(self, step: StepUnderWay) -> float:
        return self._model.seconds(len(step.runs), step.step.total_num_scheduled_tokens, step.attended)

    def _growth(self, step: StepUnderWay) -> float:
        """By how much each of equal steps is longer than the one before."""
        return self._model.per_attended_token * len(step.runs)

    def _equal_ends(self) -> Sequence[tuple[float, float]]:
        """(seconds, end) of the equal steps that have ended by now."""
        scheduler = self._scheduler
        if scheduler is None or not self._equal_steps:
            return ()
        ends: list[tuple[float, float]] = []
        oldest, end, now = scheduler.under_way[0], self._free_at, self._events.now + _ROUNDING
        seconds, growth = self._seconds(oldest), self._growth(oldest)
        while len(ends) < self._equal_steps and end + seconds <= now:
            end += seconds
            ends.append((seconds, end))
            seconds += growth
        return ends

    def _end_of_current(self) -> float:
        """When the step ends that computes now, of equal ones."""
        scheduler = self._scheduler
        if scheduler is None:
            return self._events.now
        ended, oldest = self._equal_ends(), scheduler.under_way[0]
        end = ended[-1][1] if ended else self._free_at
        if end >= self._events.now:
            return end
        return end + self._seconds(oldest) + self._growth(oldest) * len(ended)

    def catch_up(self) -> None:
        """Takes in what equal steps have brought by now, so that `stats` are as they would be."""
        if not self._inbox:  # else a step is about to end that a new request waits for
            self._leap(self._equal_ends())

    def _leap(self, steps: Sequence[tuple[float, float]]) -> None:
        scheduler = self._scheduler
        if scheduler is None or not steps:
            return
        num_runs, seconds = len(scheduler.running.runs), [duration for duration, _ in steps]
        scheduler.leap(seconds)
        self._equal_steps -= len(steps)
        self._collected(steps[-1][1], sum(seconds))
        for duration in seconds:
            self._gaps.add(duration, num_runs)
        self._deliver(scheduler, self._free_at, max(seconds))

    def _collect(self, scheduler: LeapingScheduler) -> None:
        """The oldest step has ended."""
        oldest = scheduler.under_way[0]
        seconds = self._seconds(oldest)
        end = self._free_at + seconds
        taken = end - max(oldest.scheduled_at, self._last_collected)
        self._collected(end, seconds)
        scheduler.update_from_output(_result(oldest), end, taken)
        self._deliver(scheduler, end, None)

    def _collected(self, end: float, seconds: float) -> None:
        self._free_at = self._last_collected = end
        self.busy_seconds += seconds

    def _deliver(self, scheduler: LeapingScheduler, now: float, gap: float | None) -> None:
        """`gap`: of a leap the longest step."""
        self.stats = copy(scheduler.stats())
        refused: list[Flight] = []
        since, alike = now, 0
        """Requests whose last token came at the same time, as it mostly did."""
        for output in scheduler.take_outputs():
            held = self._held[output.id]
            flight, count = held.flight, len(output.token_ids)
            if count:
                if gap is None and flight.first is not None:
                    if flight.last != since:
                        self._gaps.add(now - since, alike)
                        since, alike = flight.last, 0
                    alike += 1
                flight.got(count, now, gap)
                if output.finish_reason is None and held.begun:
                    held.unsent += count
                    continue
                held.begun = True
            if output.error is not None:
                refused.append(flight)
            self._send(held, output, now)
        self._gaps.add(now - since, alike)
        if refused and self.on_error is not None:
            self.on_error(refused)

    def _send(self, held: _Held, output: RequestOutput, now: float) -> None:
        """To the gateway: the first token, and then what has come until the end. It does not look at more."""
        if held.unsent:
            output.token_ids = [TOKEN] * held.unsent + output.token_ids
            held.unsent = 0
        if output.finish_reason is not None:
            del self._held[output.id]
            held.flight.moved |= output.error is not None
        if held.stream.add(output):
            held.stream.call_listener()
        if output.finish_reason is not None:
            held.stream.listen(None)  # listener and stream hold each other
        if output.finish_reason is not None and output.error is None:
            held.flight.end(now)


_ROUNDING = 1e-9
"""Sums of the same times in another order differ by less."""


def _result(done: StepUnderWay) -> ModelRunnerOutput:
    """One token for each request whose known tokens are all computed by the step."""
    step = done.step
    return ModelRunnerOutput(
        [
            [TOKEN] if start + number >= run.request.num_tokens else []
            for run, number, start in zip(done.runs, step.num_scheduled_tokens, step.num_computed_tokens, strict=True)
        ]
    )
