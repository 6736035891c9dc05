"""The seams of the classic side.

`InferModel` is what the fronts see: a loaded model version that answers InferRequests. Classic models and language
models both implement it. `Backend` is what a plugin implements, with the lifecycle of Triton's backends: load model,
load instances, execute batches, unload. docs/backends.md shows a whole one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from penstock.classic.batching.waits import Execution
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.model_config import ModelConfig
from penstock.classic.signature import ModelSignature
from penstock.classic.statistics import ModelStatistics
from penstock.classic.tensors import Array
from penstock.engines.errors import PenstockError


class ResponseStream(Protocol):
    """The responses of one request: an async iterator that ends after the final one.

    An error comes as a response with `error` set; if that is not `final`, more may follow.
    """

    def __aiter__(self) -> ResponseStream: ...

    async def __anext__(self) -> InferResponse: ...

    def ready(self) -> InferResponse | None:
        """The next response, if it is there already: what is ready together can leave in one write."""
        ...

    def close(self) -> None:
        """Nobody wants the rest: cancels what still runs. Idempotent."""
        ...


class AdmittedLater(ABC):
    """A ResponseStream of a model in another process: what `stream` raises elsewhere, it only knows later."""

    @abstractmethod
    async def admitted(self) -> None:
        """Returns when there is a response, which is left for the reader. Raises PenstockError: the refusal."""


class CancellableStream(ABC):
    """A ResponseStream whose model can be asked to stop. What it still sends comes, up to its own end."""

    @abstractmethod
    def cancel(self) -> bool:
        """False: it cannot be asked, only closed. Idempotent."""


class PacedStream(ABC):
    """A ResponseStream whose model can be made to wait for its reader."""

    @abstractmethod
    def pace(self) -> None:
        """From now on who sends waits while much is unread: for readers that are models themselves, and for long
        streams. To be called before the event loop turns."""


def paced(stream: ResponseStream) -> ResponseStream:
    """The same stream, which waits for its reader if it can."""
    if isinstance(stream, PacedStream):
        stream.pace()
    return stream


class ResponseListener(Protocol):
    def take(self, response: InferResponse, /) -> None:
        """Called on the event loop. Must not raise."""
        ...


class PushedStream(ABC):
    """A ResponseStream that can also call its reader: that saves the resumption of a task for each response."""

    pushes: bool
    """Whether this one can."""

    @abstractmethod
    async def __anext__(self) -> InferResponse: ...

    @abstractmethod
    def listen(self, listener: ResponseListener | None) -> None:
        """Instead of iterating: `listener` gets each response, beginning with those that wait. None: not any more; what
        comes then waits for the iterator."""


class InferModel(Protocol):
    """One version of a model. Lives on the gateway's event loop."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def config(self) -> ModelConfig:
        """Complete: names, inputs, outputs, instance groups, whatever was left to the server to fill in."""
        ...

    @property
    def signature(self) -> ModelSignature:
        """The configuration's inputs and outputs, ready to be looked up."""
        ...

    @property
    def ready(self) -> bool:
        """True while a request would be served now."""
        ...

    @property
    def takes_infer(self) -> bool:
        """Whether `infer` is offered: a request may have exactly one response."""
        ...

    @property
    def model_folder(self) -> Path | None:
        """The model's folder in its repository, where label files are."""
        ...

    @property
    def statistics(self) -> ModelStatistics: ...

    async def infer(self, request: InferRequest) -> InferResponse:
        """The one response. Cancelling the awaiting task cancels the request.

        Raises PenstockError: what ended the request, or why it was refused. UnsupportedError for models that take no
        `infer`, and for requests that ask for more than one response.
        """
        ...

    def stream(self, request: InferRequest) -> ResponseStream:
        """The responses as they come, for decoupled models and others. Raises PenstockError for refusals at once."""
        ...

    async def stop(self) -> None:
        """Lets what was accepted end, then unloads. New requests get NotReadyError."""
        ...


class SaysReady(ABC):
    """An InferModel whose own code may say that it is not ready. That is only for those who ask: as in Triton, requests
    are served whatever it says."""

    __slots__ = ()

    @property
    @abstractmethod
    def says_ready(self) -> bool: ...


def says_ready(model: InferModel) -> bool:
    """The model's own word, where it has one."""
    return not isinstance(model, SaysReady) or model.says_ready


def reports_ready(model: InferModel) -> bool:
    """The answer to the question whether the model is ready."""
    return model.ready and says_ready(model)


class InferCall(Protocol):
    """A request in a batch, as a backend sees it. Safe to use from any thread."""

    @property
    def request(self) -> InferRequest: ...

    @property
    def cancelled(self) -> bool:
        """The caller has gone, or its deadline has passed: answers are dropped."""
        ...

    def send(self, response: InferResponse) -> None:
        """Sends a response; the first `final` one ends the call, and what comes later is dropped."""
        ...

    def fail(self, error: PenstockError) -> None:
        """Ends the call with an error."""
        ...

    def reschedule(self) -> None:
        """Has it executed again in a later batch, instead of its end. During `execute`, for models with
        `iterative_sequence`."""
        ...

    @property
    def paced(self) -> bool:
        """Who sends many responses should wait for the reader, from time to time."""
        ...

    async def has_room(self) -> None:
        """Returns when not too much is unread, or the reader has not read for long. On the event loop. A thread that
        sends need not call it: `send` waits."""
        ...


class Batch(Protocol):
    """Requests to be executed together. Every call must be ended by the end of `execute`, or later by a decoupled
    model; what `execute` leaves open in a model that is not decoupled is failed by the shim."""

    @property
    def calls(self) -> Sequence[InferCall]: ...

    @property
    def execution(self) -> Execution:
        """For the requests to other models that are made while it is executed: InferRequest.asked_in."""
        ...

    def gather(self) -> dict[str, Array]:
        """Each input over the whole batch: concatenated along the first dimension in one copy (none for a single
        call), shaped as the model's framework expects it (`reshape`). Without batching: the only call's inputs.

        An input with `allow_ragged_batch` has one dimension, with the elements of all calls; the tensors of
        `batch_input` are there under the names of their targets."""
        ...

    def scatter(self, outputs: Mapping[str, Array]) -> None:
        """Answers every call with its part of `outputs` (views, no copies), of those outputs that it asked for.

        Raises ValueError when an output is missing or its first dimension is not the batch's; one of `batch_output` may
        have any shape with the right number of elements.
        """
        ...


class BackendInstance(ABC):
    """One copy of the model that executes one batch at a time, in a thread of its own.

    For code that releases the GIL. An exception from `execute` fails only the request that causes it: the calls of the
    batch that are still open are executed again one by one.
    """

    @abstractmethod
    def execute(self, batch: Batch) -> None: ...

    def unload(self) -> None:
        """Called once, after the last `execute`."""


class AsyncInstance(ABC):
    """An instance that runs elsewhere (a process of its own) and is driven from the event loop."""

    @abstractmethod
    async def start(self) -> None:
        """Raises PenstockError when it cannot be loaded. Then, and when it is cancelled, it leaves nothing behind."""

    @abstractmethod
    async def execute(self, batch: Batch) -> None:
        """Returns when the instance can take the next batch."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """False while it is being restarted: it gets no batches then, and the model is not ready."""

    @abstractmethod
    async def wait_ready(self) -> None:
        """Returns when `ready`. Raises PenstockError when it will not be ready again."""

    @abstractmethod
    async def unload(self) -> None: ...

    def kill(self) -> None:
        """Ends what it executes, if it can be ended, so that `unload`, which follows, need not wait for it."""
        return

    @property
    def says_ready(self) -> bool:
        """What the model's own code answers when someone asks whether it is ready. It is only passed on."""
        return True

    @property
    def pid(self) -> int | None:
        """Of a process that leads a session of its own; None where there is none."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceContext:
    name: str
    """`<model>_<group>_<number>`, as Triton names instances."""
    kind: str
    """CPU, GPU or MODEL; AUTO is resolved."""
    device_id: int = 0

    def require_cpu(self, reason: str) -> None:
        """For backends that put no instance on a GPU. Raises ValueError."""
        if self.kind == "GPU":
            raise ValueError(f"instance '{self.name}' must be KIND_CPU: {reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelContext:
    name: str
    version: int
    config: ModelConfig
    """Complete and validated."""
    model_folder: Path
    """The model's folder in the repository, on a local disk."""
    version_folder: Path
    """`model_folder / str(version)`, where it exists."""
    host: Host


class BackendModel(ABC):
    """A loaded model version: what its instances share."""

    @abstractmethod
    def load_instance(self, context: InstanceContext) -> BackendInstance | AsyncInstance:
        """In a thread, several at once. Raises PenstockError or ValueError when it cannot be loaded."""

    def unload(self) -> None:
        """Called once, after all instances have been unloaded."""


abandoned: ContextVar[Future[None]] = ContextVar("abandoned")
"""In the thread of `auto_complete`: done as soon as nobody waits for it any more. Unset: that is not known."""


class Backend(ABC):
    """A plugin: a class under the entry-point group `penstock.backends`, whose entry's name is the backend's name.

    `options` are the settings of `--backend-config=<name>,<key>=<value>`.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = options

    def auto_complete(self, config: ModelConfig, version_folder: Path) -> None:
        """Fills in, in place, what the model file tells and the configuration does not say. In a thread.

        Raises ValueError when the file cannot be read or contradicts the configuration.
        """

    @abstractmethod
    def load_model(self, context: ModelContext) -> BackendModel:
        """In a thread. Raises PenstockError or ValueError when it cannot be loaded."""


class Metric(Protocol):
    """A custom metric that a model reports. Called on the event loop."""

    def increment(self, value: float) -> None: ...
    def set(self, value: float) -> None: ...
    def observe(self, value: float) -> None: ...
    def value(self) -> float: ...


class Host(Protocol):
    """What a backend may ask of the server, on the event loop."""

    def model(self, name: str, version: int = -1, request: InferRequest | None = None) -> InferModel:
        """A ready model; -1: the newest version. With the `request` that it is for, names that several models serve
        are known, too, and the request gets one of these. Raises ModelNotFoundError, NotReadyError."""
        ...

    def model_ready(self, name: str, version: int = -1) -> bool:
        """Whether a request for it, or for one of several models behind the name, would be served."""
        ...

    async def use_model(self, name: str, deadline: float | None) -> Callable[[], None]:
        """Before `model`, where the server loads models on demand: returns when this one is there, and what to call
        when it need not stay any longer. `deadline` of time.monotonic(). Raises PenstockError. A model that there is
        not is no error here."""
        ...

    async def load_model(self, name: str, config: str | None, files: Mapping[str, bytes]) -> None:
        """`files` by their path in the model's folder. Raises PenstockError."""
        ...

    async def unload_model(self, name: str, *, unload_dependents: bool = False) -> None: ...

    def metric_family(self, kind: str, name: str, description: str) -> None:
        """The name is of this kind from now on, and shown with this description unless it has one. Raises ValueError
        when it is in use for another kind."""
        ...

    def metric(
        self, kind: str, name: str, description: str, labels: Mapping[str, str], buckets: Sequence[float] = ()
    ) -> Metric:
        """`kind` is COUNTER, GAUGE or HISTOGRAM. The same name and labels give the same metric. Raises ValueError when
        the name is in use for another kind."""
        ...
