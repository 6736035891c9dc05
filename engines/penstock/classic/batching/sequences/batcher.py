"""The sequence batcher: Triton's rules for requests that belong together. No clock, no loop."""

from __future__ import annotations

import copy
import heapq
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

from penstock.classic.batching.batch import CallSequence, QueuedCall
from penstock.classic.batching.queue import DEADLINE_TEXT
from penstock.classic.batching.sequences.controls import Controls
from penstock.classic.batching.sequences.strategies import Direct, Oldest, SequenceSettings, SlotStrategy
from penstock.classic.batching.sequences.table import SequenceTable, States, zeros
from penstock.classic.messages import InferRequest, InferResponse, WarmUpRequest
from penstock.classic.model_config import ModelConfig
from penstock.classic.tensors import Tensor
from penstock.engines.errors import (
    CancelledError,
    DeadlineExceededError,
    InvalidRequestError,
    PenstockError,
    QueueTimeoutError,
)

MAX_SLOTS = 2**18
"""Of all instances: far above use, and keeps a slip of the pen from taking all memory."""

Ended = list[tuple[QueuedCall, PenstockError]]


class SequenceBatcher:
    """The requests of a sequence are executed in their order, one at a time, on the instance that has its slot."""

    shared = False
    """An instance can only take requests of its own sequences."""

    def __init__(self, config: ModelConfig, model_folder: Path, instances: int) -> None:
        """Reads the files of initial states. Raises InvalidRequestError when one is missing or too short, and for more
        than MAX_SLOTS."""
        settings = SequenceSettings.of(config)
        if instances * settings.slots > MAX_SLOTS:
            raise InvalidRequestError(
                f"sequence batching of model '{settings.model}' asks for {instances * settings.slots} slots (max batch "
                f"size or max candidate sequences, for each instance), the most is {MAX_SLOTS}"
            )
        self._settings = settings
        self._controls = Controls(config)
        self._states = States(config, model_folder)
        self._table = SequenceTable(instances, settings.slots, settings.idle_ns)
        slots = self._table.slots
        self._strategy: SlotStrategy = Oldest(config, slots) if settings.oldest else Direct(settings, slots)
        self._padding = Padding()
        self._waiting: dict[QueuedCall, None] = {}
        self._ended: Ended = []
        """What `expire` has to tell of."""
        self._expiries: list[tuple[int, int, QueuedCall]] = []
        self._numbers = count()
        self._next_id = 1
        """Of a sequence that a request without an id makes (`iterative_sequence`)."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._ended)

    def __iter__(self) -> Iterator[QueuedCall]:
        return iter(list(self._waiting))

    @property
    def delay_ends(self) -> int:
        return self._strategy.delay_ends

    def add(self, call: QueuedCall, now_ns: int) -> None:
        """Raises InvalidRequestError for a request that is no part of a sequence."""
        sequence = self._sequence_of(call)
        call.arrived_ns = now_ns
        call.sequence = sequence
        sequence.calls.append(call)
        self._waiting[call] = None
        if len(sequence.calls) == 1:
            self._has_next(sequence, now_ns)
        request = call.request
        if request.sequence_end and not self._settings.iterative:
            self._table.forget(sequence)
        if request.timeout_us and sequence.slot is None:
            self._note(now_ns + request.timeout_us * 1000, call)
        if call.deadline_ns:
            self._note(call.deadline_ns, call)

    def _sequence_of(self, call: QueuedCall) -> CallSequence:
        request, name = call.request, self._settings.model
        if call.size > 1:
            raise InvalidRequestError(
                f"inference request to model '{name}' must specify batch-size 1 due to requirements of sequence batcher"
            )
        if not request.correlation_id:
            if not self._settings.iterative:
                raise InvalidRequestError(
                    f"inference request to model '{name}' must specify a non-zero or non-empty correlation ID"
                )
            request.correlation_id = self._free_id(request.tenant)
            request.sequence_start, request.sequence_end = True, False
        self._controls.check(request)
        id = (request.tenant, request.correlation_id)
        sequence = self._table.find(id)
        if sequence is not None:
            return sequence
        if not request.sequence_start:
            raise InvalidRequestError(
                f"inference request for sequence {request.correlation_id} to model '{name}' must specify the START "
                "flag on the first request of the sequence"
            )
        return self._table.open(id)

    def _free_id(self, tenant: str) -> int:
        while self._table.find((tenant, self._next_id)) is not None:
            self._next_id += 1
        self._next_id += 1
        return self._next_id - 1

    def remove(self, call: QueuedCall) -> bool:
        """Takes a request out that nobody waits for any more; False when it does not wait.

        Its sequence ends with the request before it; what comes after it is told by `expire`.
        """
        if call not in self._waiting:
            return False
        behind = self._cut(call)
        self._ended += [(other, CancelledError("the request was cancelled")) for other in behind if other is not call]
        return True

    def _cut(self, call: QueuedCall) -> list[QueuedCall]:
        """Ends a sequence before this request; gives the request and those behind it."""
        sequence = call.sequence
        assert sequence is not None
        kept = sequence.calls.index(call)
        cut = [sequence.calls.pop() for _ in range(len(sequence.calls) - kept)]
        for one in cut:
            del self._waiting[one]
        if not kept:
            self._strategy.withdraw(sequence)
        self._table.forget(sequence)
        self._table.settle(sequence, 0)
        return cut[::-1]

    def expire(self, now_ns: int) -> Ended:
        """Requests that end now without having been executed."""
        self._table.end_idle(now_ns)
        while (when := self._next_expiry()) is not None and when <= now_ns:
            self._expired(heapq.heappop(self._expiries)[2], now_ns)
        self._seat(now_ns)
        ended, self._ended = self._ended, []
        return ended

    def _expired(self, call: QueuedCall, now_ns: int) -> None:
        sequence = call.sequence
        assert sequence is not None
        if call.deadline_ns and call.deadline_ns <= now_ns:
            self.remove(call)
            self._ended.append((call, DeadlineExceededError(DEADLINE_TEXT)))
        elif sequence.slot is None:
            text = "timeout of the corresponding sequence has been expired"
            self._ended += [(other, QueueTimeoutError(text)) for other in self._cut(sequence.calls[0])]

    def _note(self, when_ns: int, call: QueuedCall) -> None:
        # What waits no longer must not be kept alive by the heap, nor make it grow without end.
        if len(self._expiries) > 2 * len(self._waiting):
            self._expiries = [entry for entry in self._expiries if entry[2] in self._waiting]
            heapq.heapify(self._expiries)
        heapq.heappush(self._expiries, (when_ns, next(self._numbers), call))

    def next_expiry(self) -> int | None:
        """When `expire` will find something."""
        times = [when for when in (self._next_expiry(), self._table.next_idle_end()) if when is not None]
        return 0 if self._ended else min(times, default=None)

    def _next_expiry(self) -> int | None:
        expiries = self._expiries
        while expiries and expiries[0][2] not in self._waiting:
            heapq.heappop(expiries)
        return expiries[0][0] if expiries else None

    def due(self, now_ns: int, instance: int) -> bool:
        """Whether `take` would give a batch."""
        return self._strategy.due(instance, now_ns)

    def take(self, now_ns: int, instance: int) -> list[QueuedCall]:
        """The next batch of an instance that executes nothing; empty when there is none now. Call `expire` first."""
        sequences = self._strategy.take(instance, now_ns)
        calls = [self._start(sequence, now_ns) if sequence is not None else None for sequence in sequences]
        if None not in calls:
            return [call for call in calls if call is not None]
        pattern = next(sequence for sequence in sequences if sequence is not None)
        real = next(call for call in calls if call is not None)
        inputs = self._padding_inputs(pattern, real)
        return [call if call is not None else PaddingCall(inputs) for call in calls]

    def _padding_inputs(self, sequence: CallSequence, call: QueuedCall) -> dict[str, Tensor]:
        """Of a slot without a request, beside this call. A warm-up is its sample's values only, as in Triton: a model
        may not be able to read empty texts."""
        if isinstance(call.request, WarmUpRequest):
            return call.request.inputs
        return self._padding.like(call) | self._states.blank(sequence) | self._controls.not_ready()

    def _start(self, sequence: CallSequence, now_ns: int) -> QueuedCall:
        call = sequence.calls.popleft()
        del self._waiting[call]
        sequence.running += 1
        request = call.request
        states = self._states.inputs(sequence, request.sequence_start) if self._states else {}
        request.inputs = request.inputs | states | self._controls.tensors(request)
        if isinstance(request, WarmUpRequest):
            request.inputs |= request.overrides
        return call

    def released(self, calls: Iterable[QueuedCall], now_ns: int) -> list[QueuedCall]:
        """These have been executed. Returns those that are to be executed again, which wait now."""
        again = []
        for call in calls:
            sequence = call.sequence
            if sequence is None:
                continue
            sequence.running -= 1
            if call.again and not call.answered and not call.done:
                call.again = call.request.sequence_start = call.request.sequence_end = False
                again.append(call)
                sequence.calls.appendleft(call)
                self._waiting[call] = None
            elif self._settings.iterative:
                self._table.forget(sequence)
            self._has_next(sequence, now_ns)
        return again

    def _has_next(self, sequence: CallSequence, now_ns: int) -> None:
        """Another request is its first one now, or none is."""
        self._table.settle(sequence, now_ns)
        if sequence.slot is not None:
            self._make_ready(sequence, now_ns)
        self._seat(now_ns)

    def _seat(self, now_ns: int) -> None:
        while (sequence := self._table.seat()) is not None:
            self._make_ready(sequence, now_ns)

    def _make_ready(self, sequence: CallSequence, now_ns: int) -> None:
        if sequence.calls and not sequence.running:
            first = sequence.calls[0]
            shapes = (first.shapes, self._states.shapes(sequence, first.request.sequence_start))
            self._strategy.ready(sequence, shapes, now_ns)

    def close(self, now_ns: int) -> None:
        """No sequence gets further requests: those that are open end with what they have."""
        self._table.close_all(now_ns)
        self._seat(now_ns)

    @property
    def idle(self) -> bool:
        """There is no sequence."""
        return not self._waiting and self._table.empty

    def check_integrity(self) -> None:
        """Raises AssertionError when the books are wrong. For tests."""
        self._table.check_integrity()

    def retire(self, instance: int, error: PenstockError) -> None:
        """The instance will execute nothing any more; `expire` tells what waited for it."""
        for sequence in self._table.retire(instance):
            if sequence.calls:
                self._ended += [(call, copy.copy(error)) for call in self._cut(sequence.calls[0])]
            else:
                self._table.settle(sequence, 0)


class PaddingCall(QueuedCall):
    """Its answers are dropped, and it is in no statistics but the size of its batch."""

    __slots__ = ()

    def __init__(self, inputs: dict[str, Tensor]) -> None:
        super().__init__(InferRequest(inputs=inputs), 1)
        self.done = True

    def deliver(self, response: InferResponse) -> None:
        pass


class Padding:
    """Inputs of zeros in the shapes of a real request's, made once for requests that are alike."""

    def __init__(self) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._inputs: dict[str, Tensor] = {}

    def like(self, call: QueuedCall) -> dict[str, Tensor]:
        # Not call.shapes: that leaves out ragged inputs, and one huge request would make all later padding as large.
        shapes = {name: tensor.array.shape for name, tensor in call.request.inputs.items()}
        if shapes != self._shapes:
            self._shapes = shapes
            self._inputs = {
                name: Tensor(name, tensor.datatype, zeros(tensor.array.dtype, tensor.array.shape))
                for name, tensor in call.request.inputs.items()
            }
        return self._inputs
