"""Requests to a classic model and its responses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from penstock.classic.batching.waits import Execution
from penstock.classic.tensors import Tensor
from penstock.engines.errors import PenstockError

Parameter = bool | int | float | str


class Trace(Protocol):
    """Where the timestamps of a traced request go."""

    def mark(self, event: str, ns: int) -> None:
        """`event` in Triton's words (QUEUE_START, COMPUTE_START, ...), `ns` of time.monotonic_ns()."""
        ...

    def child(self, model: str, version: int) -> Trace:
        """The trace of a request to this model that is made for the traced one; it has begun, and is to be finished."""
        ...

    def finish(self) -> None:
        """Writes it. Idempotent."""
        ...


class Caller(Protocol):
    """What the front knows of the caller. It is passed on with the request; backends read only `traceparent`."""

    id: str
    traceparent: str
    """As in W3C Trace Context: the span that the request belongs to; "" for none."""

    def called(self, model: str, started: float, ended: float) -> None:
        """A model has called another one for this request. Times are of time.monotonic()."""
        ...


@dataclass(slots=True, eq=False)
class Timings:
    """Nanoseconds that models have spent on behalf of a request, over all its executions."""

    compute_input: int = 0
    compute_infer: int = 0
    compute_output: int = 0

    def add(self, compute_input: int, compute_infer: int, compute_output: int) -> None:
        self.compute_input += compute_input
        self.compute_infer += compute_infer
        self.compute_output += compute_output


@dataclass(slots=True, kw_only=True, eq=False)
class InferRequest:
    """One inference request. Fronts build it; `InferModel.infer` and `.stream` validate it against the model."""

    inputs: dict[str, Tensor]
    id: str = ""
    outputs: tuple[str, ...] = ()
    """Requested outputs, in this order; empty: all of them."""
    parameters: dict[str, Parameter] = field(default_factory=dict)
    """What the caller sent beside the reserved ones."""
    priority: int = 0
    """1 is the highest; 0: the model's default level (`dynamic_batching.priority_levels`)."""
    timeout_us: int = 0
    """Microseconds it may wait in the model's queue, where the model allows callers to say so; 0: the model's own."""
    deadline: float | None = None
    """time.monotonic() after which nobody waits for the answer."""
    correlation_id: int | str = 0
    sequence_start: bool = False
    sequence_end: bool = False
    tenant: str = ""
    caller: Caller | None = None
    """None for requests that models make."""
    trace: Trace | None = None
    timings: Timings | None = None
    """Where an ensemble adds up what its steps take."""
    asked_in: Execution | None = None
    """The execution of another model that waits for the answer."""
    origin: Caller | None = None
    """Of a request that a model makes: the caller for whom it does so, where that is known."""


@dataclass(slots=True, kw_only=True, eq=False)
class WarmUpRequest(InferRequest):
    """Of a model with `sequence_batching`, before it serves."""

    overrides: dict[str, Tensor]
    """Stand in for control inputs and states of these names, which the server fills in otherwise."""


@dataclass(slots=True, eq=False)
class InferResponse:
    """One response. A model that is not decoupled gives exactly one; a decoupled one any number, the last `final`."""

    outputs: list[Tensor] | None
    """None: nothing but the final flag."""
    parameters: dict[str, Parameter] = field(default_factory=dict)
    error: PenstockError | None = None
    final: bool = True


@dataclass(frozen=True, slots=True)
class InputInfo:
    """Of a WaitingRequest."""

    datatype: str
    """In the protocol's words: FP32, BYTES."""
    shape: tuple[int, ...]
    """As the client sent it, the batch dimension first."""
    byte_size: int
    """As it travels: each element of BYTES with four bytes for its length."""


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request in the queue, as custom batching sees it: what can be known of it without its data."""

    batch_size: int
    inputs: Mapping[str, InputInfo]
    parameters: Mapping[str, Parameter]
    id: str
    """Empty when the client has given none."""
    priority: int
    """As the client has asked; 0: the model's default level."""
