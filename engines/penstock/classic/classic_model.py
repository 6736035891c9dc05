"""A loaded model version: from the request to its response."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import monotonic_ns

from penstock.classic.base import BackendModel, ModelContext, ResponseStream, SaysReady
from penstock.classic.batching.batch import ExecBatch, QueuedCall, UnaryCall, count_batch, count_response
from penstock.classic.batching.custom import CustomBatcher, CustomStrategy
from penstock.classic.batching.fine_timer import FineTimer
from penstock.classic.batching.queue import DEADLINE_TEXT, DynamicBatcher
from penstock.classic.batching.ragged import RaggedBatch, ragged_layout
from penstock.classic.batching.rate_limiter import ModelLimits
from penstock.classic.batching.responses import CallStream, Outbox, ResponseOrder, StreamCall
from penstock.classic.batching.sequences.batcher import SequenceBatcher
from penstock.classic.batching.waits import Places
from penstock.classic.instances import Instance
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.model_config import ModelConfig
from penstock.classic.signature import ModelSignature, check_request, request_prefix
from penstock.classic.statistics import ModelStatistics
from penstock.engines.errors import (
    CancelledError,
    DeadlineExceededError,
    NotReadyError,
    OverloadedError,
    PenstockError,
    QueueFullError,
    UnsupportedError,
)

_STUCK = (
    "all instances of model '{model}' wait, directly or through other models, for requests to '{model}': this one would"
    " wait for ever"
)


class ClassicModel(SaysReady):
    """Implements InferModel: validates, queues, batches, executes on the instances, answers. Lives on the event loop.

    What becomes of an admitted request is in the statistics exactly once, as a success or as a failure.
    """

    def __init__(
        self,
        context: ModelContext,
        backend_model: BackendModel,
        sequences: SequenceBatcher | None = None,
        limits: ModelLimits | None = None,
        strategy: CustomStrategy | None = None,
    ) -> None:
        """`sequences` is there for a configuration with `sequence_batching`, `limits` where the rate limiter is on,
        `strategy` for a model with custom batching."""
        self.signature = ModelSignature(context.config)
        self.statistics = ModelStatistics()
        self._context = context
        self._backend_model = backend_model
        self._loop = asyncio.get_running_loop()
        self._sequences = sequences
        self._limits = limits
        if limits is not None:
            limits.attach(self._soon)
        config = context.config
        self._strategy = strategy
        self._batcher: DynamicBatcher[QueuedCall] | SequenceBatcher
        if strategy is not None:
            self._batcher = CustomBatcher(config, strategy, self._refuse)
        else:
            self._batcher = DynamicBatcher(config) if sequences is None else sequences
        self._instances: Sequence[Instance] = ()
        ordered = config.dynamic_batching.preserve_ordering or config.sequence_batching.oldest.preserve_ordering
        layout = ragged_layout(config)
        self._make_batch: Callable[..., ExecBatch] = ExecBatch if layout is None else partial(RaggedBatch, layout)
        self._order = ResponseOrder() if ordered else None
        self._outbox = Outbox(self._loop, self._respond) if self.signature.decoupled else None
        self._places = Places()
        self._running: set[QueuedCall] = set()
        """Executed and not ended."""
        self._refusal: PenstockError | None = None
        self._drained: asyncio.Future[None] | None = None
        self._dispatch_soon = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0
        self._tell_unloaded: Callable[[], None] = lambda: None
        self._fine_timer: FineTimer | None = None
        """For queue delays."""

    @property
    def name(self) -> str:
        return self._context.name

    @property
    def version(self) -> int:
        return self._context.version

    @property
    def config(self) -> ModelConfig:
        return self._context.config

    @property
    def ready(self) -> bool:
        return self._refusal is None and any(instance.ready for instance in self._instances)

    @property
    def says_ready(self) -> bool:
        return all(instance.says_ready for instance in self._instances)

    @property
    def takes_infer(self) -> bool:
        return not self.signature.decoupled

    @property
    def model_folder(self) -> Path:
        return self._context.model_folder

    @property
    def queued(self) -> int:
        """Requests in the queue."""
        return len(self._batcher)

    @property
    def has_open_sequences(self) -> bool:
        """Their next requests need what this model keeps for them."""
        return self._sequences is not None and not self._sequences.idle

    @property
    def pids(self) -> list[int]:
        """Of its instances that are in processes."""
        return [instance.pid for instance in self._instances if instance.pid is not None]

    def attach(self, instances: Sequence[Instance]) -> None:
        """Once, before the first request."""
        self._instances = instances
        self._places.count = len(instances)

    async def infer(self, request: InferRequest) -> InferResponse:
        if self.signature.decoupled:
            raise UnsupportedError(f"model '{self.name}' is decoupled: its responses can only be streamed")
        call = UnaryCall(request, check_request(request, self.signature), self._loop.create_future())
        self._admit(call)
        try:
            return await call.future
        except asyncio.CancelledError:
            self._cancel(call)
            if not call.future.cancelled():
                call.future.exception()  # it came too late; asyncio logs those that nobody looks at
            raise

    def stream(self, request: InferRequest) -> ResponseStream:
        stream = CallStream(self._loop, self._cancel)
        self._admit(StreamCall(request, check_request(request, self.signature), stream))
        return stream

    def on_unloaded(self, tell: Callable[[], None]) -> None:
        """To be called when its memory is free."""
        self._tell_unloaded = tell

    async def stop(self) -> None:
        """Cancelling it ends at once, with NotReadyError, what still waits or runs. A thread cannot be stopped: it
        unloads its instance when it has finished, and what the instances share is not unloaded."""
        if self._drained is not None:
            await asyncio.shield(self._drained)
            return
        self._refusal = self._refusal or NotReadyError(f"model '{self.name}' is being unloaded")
        self._drained = self._loop.create_future()
        if self._sequences is not None:
            self._sequences.close(monotonic_ns())
            self._soon()
        self._check_drained()
        try:
            await asyncio.shield(self._drained)
        except asyncio.CancelledError:
            self._fail_all(self._refusal)
            for instance in self._instances:
                instance.kill()
            if not self._drained.done():
                self._drained.set_result(None)  # others may wait for the same
            self._tell_unloaded()
            raise
        finally:
            if self._timer is not None:
                self._timer.cancel()
            if self._fine_timer is not None:
                self._fine_timer.close()
            if self._limits is not None:
                self._limits.close()
        try:
            for instance in self._instances:
                instance.close()
            await asyncio.gather(*(instance.closed() for instance in self._instances))
            await asyncio.to_thread(self._backend_model.unload)
            if self._strategy is not None:
                await asyncio.to_thread(self._strategy.close)
        finally:
            self._tell_unloaded()

    # From here to the instances.

    def _admit(self, call: QueuedCall) -> None:
        if self._refusal is not None:
            raise copy.copy(self._refusal)
        signature = self.signature
        if not signature.uniform:
            call.shapes = signature.shapes(call.request.inputs)
        now = monotonic_ns()
        try:
            self._batcher.add(call, now)
        except QueueFullError as error:
            self.statistics.failed(0, "REJECTED")
            raise QueueFullError(request_prefix(call.request) + error.message) from None
        asked_in = call.request.asked_in
        if asked_in is not None and not asked_in.wait(call, self._places):
            self._batcher.remove(call)
            self.statistics.failed(0, "REJECTED")
            raise OverloadedError(_STUCK.format(model=self.name))
        self.statistics.pending += 1
        if call.request.trace is not None:
            call.request.trace.mark("QUEUE_START", now)
        # Not now: requests that come in the same turn of the loop can share the batch.
        self._soon()

    def _dispatch(self) -> None:
        """Gives batches to idle instances, ends requests whose time is over, and sees to it that it is called again."""
        batcher, limits = self._batcher, self._limits
        now = monotonic_ns()
        for call, error in batcher.expire(now):
            self.statistics.pending -= 1
            self._fail(call, error, "REJECTED" if isinstance(error, OverloadedError) else "CANCELED")
        wake = batcher.next_expiry()
        delay_ends = 0
        refused = set()
        for number, instance in enumerate(self._instances):
            if not batcher:
                break
            if not instance.idle:
                continue
            if not instance.ready:
                instance.recover()
                continue
            if limits is not None and batcher.due(now, number) and not limits.acquire(number):
                refused.add(number)
                continue
            calls = batcher.take(now, number)
            if calls:
                if limits is not None:
                    limits.started(number)
                self._start(instance, calls)
                continue
            if batcher.delay_ends and (not delay_ends or batcher.delay_ends < delay_ends):
                delay_ends = batcher.delay_ends
            if batcher.shared:
                refused.clear()
                break
        if limits is not None:
            limits.wait(refused if batcher else ())
        if delay_ends:
            self._wait_for_more(delay_ends)
        if wake is not None:
            self._wake_at(wake, now)

    def _start(self, instance: Instance, calls: list[QueuedCall]) -> None:
        for call in calls:
            if call.done:  # it fills a slot, nobody has sent it
                continue
            self.statistics.pending -= 1
            self._running.add(call)
            if self._order is not None:
                self._order.enter(call)
            if call.deadline_ns and call.timer is None:
                wait = (call.deadline_ns - monotonic_ns()) / 1e9
                call.timer = self._loop.call_later(max(0.0, wait), self._deadline_passed, call)
        post = self._outbox.post if self._outbox is not None else None
        batch = self._make_batch(calls, self.signature, post, self._places)
        for call in calls:
            if call.request.asked_in is not None and not call.done:
                call.request.asked_in.begin(call, batch.execution)
        instance.execute(batch)

    def _dispatch_in_turn(self) -> None:
        self._dispatch_soon = False
        self._dispatch()

    def _wait_for_more(self, until: int) -> None:
        """The batch goes then, whatever has come to it."""
        if self._fine_timer is None:
            self._fine_timer = FineTimer(self._loop, self._dispatch)
        self._fine_timer.set(until)

    def _soon(self) -> None:
        if not self._dispatch_soon:
            self._dispatch_soon = True
            self._loop.call_soon(self._dispatch_in_turn)

    def _wake_at(self, when: int, now: int) -> None:
        if self._timer is None or when < self._timer_ns:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_ns = when
            self._timer = self._loop.call_later((when - now) / 1e9, self._timed)

    def _timed(self) -> None:
        self._timer = None
        self._dispatch()

    # From here back to the caller.

    def changed(self, batch: ExecBatch | None = None) -> None:
        if self._limits is not None:
            self._limits.ended(self._instances)
        if self._sequences is not None:
            self._sequences_changed(self._sequences, batch)
            self._dispatch()
        elif self._batcher:
            self._dispatch()
        if self._limits is not None:
            self._limits.settle()
        if all(instance.lost is not None for instance in self._instances):
            self._refusal = self._refusal or self._instances[0].lost
            self._fail_all(self._instances[0].lost or NotReadyError("the model is lost"))
        self._check_drained()

    def _sequences_changed(self, sequences: SequenceBatcher, batch: ExecBatch | None) -> None:
        if batch is not None:
            if self._outbox is not None:
                self._outbox.flush()
            for call in sequences.released(batch.calls, monotonic_ns()):
                self._running.discard(call)
                self.statistics.pending += 1
        for number, instance in enumerate(self._instances):
            if instance.lost is not None:
                sequences.retire(number, instance.lost)

    def executed(self, batch: ExecBatch) -> None:
        if self._outbox is not None:
            self._outbox.flush()
        answers = []
        for answer in batch.answers:
            if not answer[0].done:
                self._end(answer[0])
                answers.append(answer)
        count_batch(self.statistics, batch, answers)
        for call, response in answers:
            self._deliver(call, batch, response)
        batch.release()
        self._check_drained()

    def _respond(self, call: QueuedCall, response: InferResponse) -> None:
        """A response of a decoupled model."""
        batch = call.batch
        if call.done or batch is None:
            return
        count_response(self.statistics, call, batch, response)
        if response.final:
            self._end(call)
        self._deliver(call, batch, response)
        if response.final:
            call.batch = None  # a batch and its calls know each other: no request leaves a cycle
            self._check_drained()

    def _deliver(self, call: QueuedCall, batch: ExecBatch, response: InferResponse) -> None:
        if call.request.trace is not None and response.final:
            batch.mark(call.request.trace)
        if self._order is None:
            call.deliver(response)
        else:
            self._order.deliver(call, response)

    def _end(self, call: QueuedCall) -> None:
        call.done = True
        self._running.discard(call)
        if call.timer is not None:
            call.timer.cancel()
        if call.request.asked_in is not None:
            call.request.asked_in.leave(call)

    def _fail(self, call: QueuedCall, error: PenstockError, reason: str) -> None:
        """Ends a call, wherever it is; the backend may still be at work on it."""
        if call.done:
            return
        call.cancelled = True
        if self._batcher.remove(call):
            self.statistics.pending -= 1
            if self._sequences is not None:  # those behind it end, too
                self._soon()
        self._end(call)
        self.statistics.failed(monotonic_ns() - call.arrived_ns, reason)
        call.deliver(InferResponse(None, error=error))
        if self._order is not None:
            self._order.leave(call)
        self._check_drained()

    def _refuse(self, call: QueuedCall, error: PenstockError) -> None:
        self._fail(call, error, "OTHER")

    def _cancel(self, call: QueuedCall) -> None:
        self._fail(call, CancelledError("the request was cancelled"), "CANCELED")

    def _deadline_passed(self, call: QueuedCall) -> None:
        self._fail(call, DeadlineExceededError(DEADLINE_TEXT), "CANCELED")

    def _fail_all(self, error: PenstockError) -> None:
        for call in [*self._batcher, *self._running]:
            self._fail(call, copy.copy(error), "OTHER")

    def _check_drained(self) -> None:
        drained = self._drained
        if drained is None or drained.done() or self._batcher or self._running:
            return
        if all(instance.idle for instance in self._instances):
            drained.set_result(None)
