"""Requests on their way through a model: a call, the sequence it belongs to, the batch that executes it, and what both
add to the statistics.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from asyncio import Future, TimerHandle
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from time import monotonic_ns

import numpy as np

from penstock.classic.batching.queue import QueueEntry
from penstock.classic.batching.waits import Execution, Places
from penstock.classic.messages import InferRequest, InferResponse, Trace, WaitingRequest
from penstock.classic.signature import ModelSignature, TensorSignature
from penstock.classic.statistics import MAX_RESPONSE_STATISTICS, ModelStatistics
from penstock.classic.tensors import Array, Tensor
from penstock.engines.errors import CancelledError, EngineDeadError, EngineError, PenstockError


class QueuedCall(QueueEntry, ABC):
    """The `InferCall` that backends see. `send` and `fail` may come from any thread; the rest is the event loop's.

    Subclasses say where responses go.
    """

    __slots__ = (
        "again",
        "answered",
        "batch",
        "cancelled",
        "done",
        "first",
        "last_ns",
        "request",
        "responses",
        "sent",
        "sequence",
        "timer",
        "waiting",
    )
    waiting: WaitingRequest
    """In the queue of a model with custom batching, and not set elsewhere."""

    def __init__(self, request: InferRequest, batch_size: int) -> None:
        deadline = request.deadline
        super().__init__(
            size=batch_size or 1,
            priority=request.priority,
            timeout_us=request.timeout_us,
            deadline_ns=0 if deadline is None else max(1, int(deadline * 1e9)),
        )
        self.request = request
        self.cancelled = False
        self.answered = False
        """The backend has sent its final response."""
        self.sent = False
        """The backend has sent something."""
        self.first: InferResponse | None = None
        """Of a model that is not decoupled: its response, when that was not sent as the final one."""
        self.done = False
        """Ended, for the caller and in the statistics."""
        self.batch: ExecBatch | None = None
        """The one it is executed in."""
        self.responses = 0
        """Given to the caller so far."""
        self.last_ns = 0
        """When the last of them was."""
        self.timer: TimerHandle | None = None
        self.sequence: CallSequence | None = None
        """The one it belongs to, in a model with `sequence_batching`."""
        self.again = False
        """It is to be executed again in a later batch."""

    def send(self, response: InferResponse) -> None:
        batch = self.batch
        if self.answered or batch is None:
            return
        self.sent = True
        if response.final:
            self.answered = True
        batch.send(self, response)

    def fail(self, error: PenstockError) -> None:
        self.send(InferResponse(None, error=error))

    def reschedule(self) -> None:
        self.again = True

    @property
    def paced(self) -> bool:
        return False

    async def has_room(self) -> None:
        return

    def is_ahead(self, response: InferResponse) -> bool:
        """Whether the thread that has sent this should wait until there is room."""
        return False

    @abstractmethod
    def deliver(self, response: InferResponse) -> None:
        """Gives it to the caller. After a final one nothing follows."""


class UnaryCall(QueuedCall):
    """The caller awaits the one response."""

    __slots__ = ("future",)

    def __init__(self, request: InferRequest, batch_size: int, future: Future[InferResponse]) -> None:
        super().__init__(request, batch_size)
        self.future = future

    def deliver(self, response: InferResponse) -> None:
        if self.future.done():
            return
        if response.error is not None:
            self.future.set_exception(response.error)
        else:
            self.future.set_result(response)


SequenceId = tuple[str, int | str]
"""The caller's tenant, and the correlation id: tenants may choose the same ids, and share no sequence."""


class SequenceSlot:
    """A place in an instance. With the direct strategy it is also the place in the instance's batches."""

    __slots__ = ("index", "instance", "sequence")

    def __init__(self, instance: int, index: int) -> None:
        self.instance = instance
        self.index = index
        self.sequence: CallSequence | None = None


class CallSequence:
    __slots__ = ("calls", "closed", "id", "running", "slot", "states")

    def __init__(self, id: SequenceId) -> None:
        self.id = id
        self.calls: deque[QueuedCall] = deque()
        """Those that wait, in the order of their arrival."""
        self.running = 0
        """Of its requests: those that are executed now."""
        self.slot: SequenceSlot | None = None
        self.closed = False
        """It takes no further requests."""
        self.states: dict[str, Array] = {}
        """Implicit state, by the names of the inputs."""


Post = Callable[[QueuedCall, InferResponse], None]


class ExecBatch:
    """The `Batch` that backends see. Times are time.monotonic_ns(); what was not called has the time of what follows.

    The answers of a model that is not decoupled are collected and leave together when `execute` has ended: one wake-up
    of the event loop for the batch. Responses of decoupled models go out at once, through `post`.
    """

    __slots__ = (
        "_execution",
        "_places",
        "_post",
        "_signature",
        "answers",
        "calls",
        "end_ns",
        "failed",
        "input_end_ns",
        "output_start_ns",
        "size",
        "start_ns",
    )

    def __init__(
        self, calls: list[QueuedCall], signature: ModelSignature, post: Post | None, places: Places | None = None
    ) -> None:
        """`places`: those of the model."""
        self.calls = calls
        self.size = 0
        for call in calls:
            call.batch = self
            self.size += call.size
        self.answers: list[tuple[QueuedCall, InferResponse]] = []
        self.start_ns = self.input_end_ns = self.output_start_ns = self.end_ns = 0
        self._signature = signature
        self.failed = False
        """`execute` has raised."""
        self._post = post
        self._places = places
        self._execution: Execution | None = None

    @property
    def execution(self) -> Execution:
        if self._execution is None:
            self._execution = Execution(self._places or Places())
        return self._execution

    def gather(self) -> dict[str, Array]:
        calls, signature = self.calls, self._signature
        first = calls[0].request.inputs
        if len(calls) == 1:
            arrays = {name: tensor.array for name, tensor in first.items()}
        else:
            arrays = {name: np.concatenate([call.request.inputs[name].array for call in calls]) for name in first}
        if signature.reshapes_inputs:
            arrays = {name: signature.to_model(name, array) for name, array in arrays.items()}
        self.input_end_ns = monotonic_ns()
        return arrays

    def scatter(self, outputs: Mapping[str, Array]) -> None:
        self.output_start_ns = monotonic_ns()
        signature = self._signature
        names = self._requested_outputs()
        ready = {name: self._checked(signature.outputs[name], outputs.get(name), self.size) for name in names}
        if signature.states:
            self._keep_states(outputs)
        single = not signature.batched or len(self.calls) == 1
        start = 0
        for call in self.calls:
            stop = start + call.size
            tensors = []
            for name in call.request.outputs or names:
                datatype, array = ready[name]
                tensors.append(Tensor(name, datatype, array if single else array[start:stop]))
            if not call.answered:
                call.sent = call.answered = True
                self._emit(call, InferResponse(tensors))
            start = stop

    def _keep_states(self, outputs: Mapping[str, Array]) -> None:
        single = not self._signature.batched or len(self.calls) == 1
        for input_name, expected in self._signature.states.values():
            _, array = self._checked(expected, outputs.get(expected.name), self.size)
            start = 0
            for call in self.calls:
                stop = start + call.size
                if call.sequence is not None:
                    # A copy: a view would keep the states of the whole batch in memory.
                    call.sequence.states[input_name] = array if single else array[start:stop].copy()
                start = stop

    def _keep_sent_states(self, call: QueuedCall, outputs: list[Tensor]) -> list[Tensor]:
        """The outputs without those that callers do not get. Raises ValueError."""
        signature = self._signature
        for tensor in outputs:
            if tensor.name in signature.states and call.sequence is not None:
                input_name, expected = signature.states[tensor.name]
                _, array = self._checked(expected, tensor.array, call.size)
                # A copy: the array may lie in memory that its sender wants back.
                call.sequence.states[input_name] = array.copy()
        return [tensor for tensor in outputs if tensor.name in signature.outputs or tensor.name not in signature.states]

    def send(self, call: QueuedCall, response: InferResponse) -> None:
        """What a call of this batch sends: outputs as the model gives them."""
        if response.outputs:
            try:
                if self._signature.states:
                    response.outputs = self._keep_sent_states(call, response.outputs)
                response.outputs = self._for_caller(call, response.outputs)
            except ValueError as error:
                response.outputs, response.error = None, EngineError(f"model '{self._signature.model}': {error}")
        self._emit(call, response)

    def _for_caller(self, call: QueuedCall, outputs: list[Tensor]) -> list[Tensor]:
        """Those that were asked for, in that order, in the shape that callers get; none that the configuration does
        not know. Raises ValueError when none is of the configuration's, or one does not fit its `reshape`."""
        signature = self._signature
        if signature.outputs and not any(tensor.name in signature.outputs for tensor in outputs):
            actual, known = (", ".join(map(repr, names)) for names in ([t.name for t in outputs], signature.outputs))
            raise ValueError(f"the model answered with {actual}; the outputs of its configuration are {known}")
        if call.request.outputs:
            by_name = {tensor.name: tensor for tensor in outputs}
            outputs = [by_name[name] for name in call.request.outputs if name in by_name]
        else:
            outputs = [tensor for tensor in outputs if tensor.name in signature.outputs]
        if not signature.reshapes_outputs:
            return outputs
        to_client = signature.to_client
        return [Tensor(tensor.name, tensor.datatype, to_client(tensor.name, tensor.array)) for tensor in outputs]

    def _emit(self, call: QueuedCall, response: InferResponse) -> None:
        if not self.output_start_ns:
            self.output_start_ns = monotonic_ns()
        if self._post is not None:
            self._post(call, response)
        elif response.final and call.first is None:
            self.answers.append((call, response))
        else:
            self._send_later(call, response)

    def _send_later(self, call: QueuedCall, response: InferResponse) -> None:
        """A model that is not decoupled may send its response first, and an empty one to say that it was the last."""
        first = call.first
        if first is None:
            call.first = response
        elif response.error is not None:
            self.answers.append((call, response))
        elif response.outputs:
            call.answered = True
            error = EngineError(f"model '{self._signature.model}' gave several responses, and is not decoupled")
            self.answers.append((call, InferResponse(None, error=error)))
        elif response.final:
            first.final = True
            self.answers.append((call, first))

    def release(self) -> None:
        """Lets go of the answers, so that their memory is free without a garbage collection."""
        for call, response in self.answers:
            if response.final:
                call.batch = None
        self.answers = []

    def split(self, calls: Iterable[QueuedCall]) -> list[ExecBatch]:
        """Each of these calls in a batch of its own, to be executed again."""
        return [self._alone(call) for call in calls]

    def _alone(self, call: QueuedCall) -> ExecBatch:
        return ExecBatch([call], self._signature, self._post, self._places)

    def close(self, error: PenstockError | None) -> list[QueuedCall]:
        """Execution has ended, well or with an error. Returns the calls that should be executed again one by one.

        Those of a batch of several that have got nothing yet: one of them may be to blame. All other open ones fail,
        without an error those of a model that is not decoupled.
        """
        if self._execution is not None:
            self._execution.end()
        self.end_ns = monotonic_ns()
        self.output_start_ns = self.output_start_ns or self.end_ns
        self.input_end_ns = min(self.input_end_ns or self.start_ns, self.output_start_ns)
        if error is None:
            if self._post is None and len(self.answers) < len(self.calls):
                for call in self.calls:
                    if not call.again:
                        call.fail(EngineError(f"model '{self._signature.model}' gave no response"))
            return []
        self.failed = True
        again: list[QueuedCall] = []
        # A request of a sequence may have changed what the model keeps of it.
        several = len(self.calls) > 1 and not self._signature.sequences and not isinstance(error, EngineDeadError)
        for call in self.calls:
            call.again = False
            if several and not call.sent and not call.cancelled:
                again.append(call)
            else:
                # Each its own: an exception that is raised in several places grows with every traceback.
                call.fail(copy.copy(error))
        return again

    def durations(self) -> tuple[int, int, int]:
        """compute_input, compute_infer, compute_output; after `close`."""
        return (
            self.input_end_ns - self.start_ns,
            self.output_start_ns - self.input_end_ns,
            self.end_ns - self.output_start_ns,
        )

    def mark(self, trace: Trace) -> None:
        now = monotonic_ns()
        trace.mark("COMPUTE_START", self.start_ns)
        trace.mark("COMPUTE_INPUT_END", self.input_end_ns or self.start_ns)
        trace.mark("COMPUTE_OUTPUT_START", self.output_start_ns or now)
        trace.mark("COMPUTE_END", self.end_ns or now)

    def _requested_outputs(self) -> Iterable[str]:
        """The outputs that some call asks for."""
        if not all(call.request.outputs for call in self.calls):
            return self._signature.outputs
        return dict.fromkeys(name for call in self.calls for name in call.request.outputs)

    def _checked(self, expected: TensorSignature, array: Array | None, size: int) -> tuple[str, Array]:
        """The datatype, and the array as callers get it, of `size` inferences. Raises ValueError."""
        name = expected.name
        if array is None:
            raise ValueError(f"the model gave no output '{name}'")
        signature = self._signature
        if array.dtype != expected.dtype:
            array = as_bytes(array, expected)
        if signature.batched and (not array.ndim or array.shape[0] != size):
            raise ValueError(f"the output '{name}' has the shape {list(array.shape)} for a batch of {size} inferences")
        if not array.flags.c_contiguous:
            array = np.ascontiguousarray(array)
        return expected.datatype, array if expected.reshape is None else signature.to_client(name, array)


def as_bytes(array: Array, expected: TensorSignature) -> Array:
    """The array in the datatype of the configuration, which it has, but for text and bytes in numpy's own types: models
    may give these for BYTES. Raises ValueError."""
    if array.dtype == expected.dtype:
        return array
    if expected.datatype != "BYTES" or array.dtype.kind not in "SU":
        raise ValueError(
            f"the output '{expected.name}' has numpy's type {array.dtype}, the configuration says {expected.datatype}"
        )
    text = np.char.encode(array, "utf-8") if array.dtype.kind == "U" else array
    return text.astype(np.object_)


def count_batch(statistics: ModelStatistics, batch: ExecBatch, answers: list[tuple[QueuedCall, InferResponse]]) -> None:
    """An execution that has ended, and its answers: of a model that is not decoupled one, the last, for each call."""
    compute_input, compute_infer, compute_output = batch.durations()
    if not batch.failed:
        statistics.executed(batch.size, compute_input, compute_infer, compute_output)
    now, start = monotonic_ns(), batch.start_ns
    requests = inferences = total = queue = 0
    observer = statistics.observer
    for call, response in answers:
        if response.error is not None:
            statistics.failed(now - call.arrived_ns, _reason(response.error))
            continue
        requests += 1
        inferences += call.size
        total += now - call.arrived_ns
        queue += start - call.arrived_ns
        if call.request.timings is not None:
            call.request.timings.add(compute_input, compute_infer, compute_output)
        if observer is not None:
            observer.request(
                now - call.arrived_ns, start - call.arrived_ns, compute_input, compute_infer, compute_output
            )
    if requests:
        statistics.succeeded(
            requests=requests,
            inferences=inferences,
            total=total,
            queue=queue,
            compute_input=compute_input,
            compute_infer=compute_infer,
            compute_output=compute_output,
        )


def count_response(statistics: ModelStatistics, call: QueuedCall, batch: ExecBatch, response: InferResponse) -> None:
    """A response of a decoupled model; its time is that since the one before it."""
    now = monotonic_ns()
    one = statistics.responses[min(call.responses, MAX_RESPONSE_STATISTICS - 1)]
    spent = now - (call.last_ns or batch.input_end_ns or batch.start_ns)
    observer = statistics.observer
    if observer is not None and not call.responses:
        observer.first_response(now - call.arrived_ns)
    call.responses += 1
    call.last_ns = now
    if response.error is not None:
        one.fail.add(spent)
    elif response.outputs:
        one.compute_infer.add(spent)
        one.compute_output.add(0)
        one.success.add(spent)
    else:
        one.empty_response.add(spent)
    if not response.final:
        return
    if response.error is not None:
        statistics.failed(now - call.arrived_ns, _reason(response.error))
        return
    total, queue = now - call.arrived_ns, batch.start_ns - call.arrived_ns
    compute_input = max(0, batch.input_end_ns - batch.start_ns)
    compute_infer = now - batch.start_ns - compute_input
    if call.request.timings is not None:
        call.request.timings.add(compute_input, compute_infer, 0)
    if observer is not None:
        observer.request(total, queue, compute_input, compute_infer, 0)
    statistics.succeeded(
        requests=1,
        inferences=call.size,
        total=total,
        queue=queue,
        compute_input=compute_input,
        compute_infer=compute_infer,
        compute_output=0,
    )


def _reason(error: PenstockError) -> str:
    return "CANCELED" if isinstance(error, CancelledError) else "BACKEND"
