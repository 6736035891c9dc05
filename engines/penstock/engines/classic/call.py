"""One request on its way: in the queue, in a batch, answered."""

from __future__ import annotations

from asyncio import Future, TimerHandle
from typing import TYPE_CHECKING

from penstock.engines.classic.messages import InferRequest, InferResponse
from penstock.engines.classic.queue import Waiting
from penstock.engines.errors import EngineError, PenstockError

if TYPE_CHECKING:
    from penstock.engines.classic.batch import ExecBatch


class Call(Waiting):
    """The `InferCall` that backends see. `send` and `fail` may come from any thread; the rest is the event loop's.

    Subclasses say where responses go.
    """

    __slots__ = ("answered", "batch", "cancelled", "done", "last_ns", "request", "responses", "rows", "sent", "timer")

    def __init__(self, request: InferRequest, batch_size: int) -> None:
        deadline = request.deadline
        super().__init__(
            size=batch_size or 1,
            priority=request.priority,
            timeout_us=request.timeout_us,
            deadline_ns=0 if deadline is None else max(1, int(deadline * 1e9)),
        )
        self.request = request
        self.rows = batch_size
        """Its part of the batch's first dimension."""
        self.cancelled = False
        self.answered = False
        """The backend has sent its final response."""
        self.sent = False
        """The backend has sent something."""
        self.done = False
        """Ended, for the caller and in the statistics."""
        self.batch: ExecBatch | None = None
        """The one it is executed in."""
        self.responses = 0
        """Given to the caller so far."""
        self.last_ns = 0
        """When the last of them was."""
        self.timer: TimerHandle | None = None

    def send(self, response: InferResponse) -> None:
        if self.answered or self.batch is None:
            return
        self.sent = True
        if response.final:
            self.answered = True
        self.batch.send(self, response)

    def fail(self, error: PenstockError) -> None:
        self.send(InferResponse(None, error=error))

    def deliver(self, response: InferResponse) -> None:
        """Gives it to the caller. After a final one nothing follows."""
        raise EngineError("a call without a caller")


class UnaryCall(Call):
    """The caller awaits the one response."""

    __slots__ = ("_first", "future")

    def __init__(self, request: InferRequest, batch_size: int, future: Future[InferResponse]) -> None:
        super().__init__(request, batch_size)
        self.future = future
        self._first: InferResponse | None = None

    def deliver(self, response: InferResponse) -> None:
        if self.future.done():
            return
        first = self._first
        if response.error is not None:
            self.future.set_exception(response.error)
        elif not response.final or first is not None:
            self._several(response)
        else:
            self.future.set_result(response)

    def _several(self, response: InferResponse) -> None:
        """A model may send its response and say later, with an empty one, that it was the last."""
        if self._first is None:
            self._first = response
        elif response.outputs:
            self.future.set_exception(EngineError("the model gave more than one response, and is not decoupled"))
        elif response.final:
            self._first.final = True
            self.future.set_result(self._first)
