"""One request on its way: in the queue, in a batch, answered."""

from __future__ import annotations

from abc import ABC, abstractmethod
from asyncio import Future, TimerHandle
from typing import TYPE_CHECKING

from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.queue import Waiting
from penstock.engines.errors import PenstockError

if TYPE_CHECKING:
    from penstock.classic.batch import ExecBatch
    from penstock.classic.custom_batching.request import WaitingRequest
    from penstock.classic.sequences.table import Sequence


class Call(Waiting, ABC):
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
        self.sequence: Sequence | None = None
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


class UnaryCall(Call):
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
