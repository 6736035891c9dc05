"""An ensemble as a model: requests in, the responses of its last steps out."""

from __future__ import annotations

import asyncio
import copy
import logging
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from time import monotonic_ns

from penstock.classic.base import InferModel, ModelContext
from penstock.classic.ensemble.plan import make_plan
from penstock.classic.ensemble.running import EnsembleRequest, IsLast, Values, run_stages, run_steps
from penstock.classic.ensemble.wiring import wire
from penstock.classic.messages import InferRequest, InferResponse, Timings
from penstock.classic.model_config import ModelConfig
from penstock.classic.signature import ModelSignature, check_request
from penstock.classic.statistics import ModelStatistics
from penstock.engines.errors import CancelledError, EngineError, NotReadyError, PenstockError, UnsupportedError

logger = logging.getLogger(__name__)

_UNREAD = 16
"""Responses that wait for their reader. Then the steps wait, too."""

Give = Callable[[InferResponse], Awaitable[None]]
"""Takes a response; waits while too many are unread."""


class EnsembleStream:
    """Implements ResponseStream over a task that runs the request."""

    def __init__(self, produce: Callable[[Give], Coroutine[None, None, None]], ended: Callable[[], None]) -> None:
        """`produce` gives all responses, the last one `final`. `ended` is called once, when it is over."""
        self._unread: asyncio.Queue[InferResponse] = asyncio.Queue(_UNREAD)
        self._closed = False
        self._task = asyncio.create_task(produce(self._unread.put))
        self._ended = ended
        self._task.add_done_callback(self._over)

    def __aiter__(self) -> EnsembleStream:
        return self

    async def __anext__(self) -> InferResponse:
        if self._closed:
            raise StopAsyncIteration
        response = await self._unread.get()
        if self._closed:
            raise StopAsyncIteration
        return self._passed_on(response)

    def ready(self) -> InferResponse | None:
        return None if self._closed or self._unread.empty() else self._passed_on(self._unread.get_nowait())

    def _passed_on(self, response: InferResponse) -> InferResponse:
        self._closed = response.final
        return response

    def _over(self, task: asyncio.Task[None]) -> None:
        self._ended()
        if self._closed and self._unread.empty():
            self._unread.put_nowait(InferResponse(None))  # wakes the reader of a stream that another task has closed

    def close(self) -> None:
        if not self._closed:  # behind the final response, the task ends by itself
            self._closed = True
            self._task.cancel()


class InFlight:
    """Requests in the order of their beginning: `settled` waits for those that have begun, and for no later ones."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Event, None] = {}

    def __len__(self) -> int:
        return len(self._running)

    def begin(self) -> asyncio.Event:
        """To be given to `end`."""
        ended = asyncio.Event()
        self._running[ended] = None
        return ended

    def end(self, request: asyncio.Event) -> None:
        del self._running[request]
        request.set()

    async def settled(self) -> None:
        for request in list(self._running):
            await request.wait()


class EnsembleEntry:
    """A request, from its admission to its end. One that succeeds is one execution with the times of its steps."""

    def __init__(
        self,
        statistics: ModelStatistics,
        in_flight: InFlight,
        inferences: int,
        timings: Timings,
        outer: Timings | None,
    ) -> None:
        """`timings`: what its steps have taken; `outer`: those of the ensemble that it is a step of."""
        self._statistics = statistics
        self._in_flight = in_flight
        self._timings = timings
        self._outer = outer
        self._inferences = inferences
        self._started = monotonic_ns()
        self._running: asyncio.Event | None = in_flight.begin()
        self._has_responded = False

    def responded(self) -> None:
        """There is a response of a stream, or an error in its place."""
        if not self._has_responded:
            self._has_responded = True
            if self._statistics.observer is not None:
                self._statistics.observer.first_response(monotonic_ns() - self._started)

    def succeeded(self) -> None:
        if self._ended():
            return
        spent, count = self._timings, self._inferences
        if self._outer is not None:
            self._outer.add(spent.compute_input, spent.compute_infer, spent.compute_output)
        times = {
            "compute_input": spent.compute_input,
            "compute_infer": spent.compute_infer,
            "compute_output": spent.compute_output,
        }
        self._statistics.executed(count, **times)
        total = monotonic_ns() - self._started
        self._statistics.succeeded(requests=1, inferences=count, total=total, queue=0, **times)
        if self._statistics.observer is not None:
            self._statistics.observer.request(total=total, queue=0, **times)

    def failed(self, error: BaseException) -> None:
        if not self._ended():
            cancelled = isinstance(error, CancelledError | asyncio.CancelledError)
            reason = "CANCELED" if cancelled else "OTHER"
            self._statistics.failed(monotonic_ns() - self._started, reason)

    def _ended(self) -> bool:
        """Whether it had ended before."""
        running, self._running = self._running, None
        if running is None:
            return True
        self._in_flight.end(running)
        return False


Find = Callable[[str, int], InferModel]
"""The model of a name and version (-1: the newest), ready or not. Raises PenstockError."""

_WIDTH = 64
"""Responses of a decoupled step that are on their way, where `max_inflight_requests` does not say it."""


class EnsembleModel:
    """Implements InferModel over the models of its steps, which it does not own. Lives on the event loop."""

    def __init__(self, context: ModelContext, find: Find) -> None:
        """Raises PenstockError when a model is not there or does not fit."""
        self.statistics = ModelStatistics()
        self._context = context
        self._find = find
        self._plan = make_plan(context.config)
        self._in_flight = InFlight()
        self._stopping = False
        self._width = int(context.config.ensemble_scheduling.max_inflight_requests) or _WIDTH
        self.wire_again()

    def wire_again(self) -> None:
        """One of its models has been replaced. Raises PenstockError when the new one does not fit."""
        config = self._context.config
        self._wiring = wire(self._plan, config, lambda step: self._find(step.model, step.version))
        config.model_transaction_policy.decoupled = bool(self._wiring.decoupled)
        self.signature = ModelSignature(config)

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
    def composing(self) -> frozenset[str]:
        """The names of the models that it is made of."""
        return self._plan.models

    @property
    def ready(self) -> bool:
        try:
            return not self._stopping and all(model.ready for model in self.step_models().values())
        except PenstockError:
            return False

    @property
    def takes_infer(self) -> bool:
        return self._wiring.unary

    @property
    def model_folder(self) -> Path:
        return self._context.model_folder

    def source(self, output: str) -> tuple[InferModel, str] | None:
        """The model whose output of this name becomes the ensemble's `output`; None when it is gone, or where the
        output is the caller's own input."""
        step = self._plan.producers.get(output)
        if step is None:
            return None
        name = next(name for name, tensor in step.outputs.items() if tensor == output)
        try:
            return self._find(step.model, step.version), name
        except PenstockError:
            return None

    async def infer(self, request: InferRequest) -> InferResponse:
        if not self._wiring.unary:
            raise UnsupportedError(f"model '{self.name}' is decoupled: its responses can only be streamed")
        steps, entry = self._begun(request)
        try:
            values = await run_steps(self._wiring.selection(request.outputs), steps.inputs(), steps.infer)
            response = steps.response(values, final=True)
        except PenstockError as error:
            entry.failed(error)
            raise self._named(error) from error
        except BaseException as error:
            entry.failed(error)
            raise
        entry.succeeded()
        return response

    def stream(self, request: InferRequest) -> EnsembleStream:
        steps, entry = self._begun(request)
        stages = self._wiring.stages(request.outputs)

        async def produce(give: Give) -> None:
            open_end = True

            async def emit(values: Values, is_last: IsLast) -> None:
                nonlocal open_end
                entry.responded()
                last = is_last()
                if last:
                    open_end = False
                    entry.succeeded()  # before the caller hears of it
                await give(steps.response(values, final=last))

            try:
                await run_stages(steps, stages, steps.inputs(), self._width, emit)
            except Exception as error:
                entry.responded()
                entry.failed(error)
                await give(InferResponse(None, error=self._named(error)))
                return
            if open_end:
                entry.responded()
                entry.succeeded()
                await give(InferResponse(None))

        return EnsembleStream(produce, lambda: entry.failed(CancelledError("the request was cancelled")))

    def _begun(self, request: InferRequest) -> tuple[EnsembleRequest, EnsembleEntry]:
        """Raises PenstockError: a refusal."""
        if self._stopping:
            raise NotReadyError(f"model '{self.name}' is being unloaded")
        batch = check_request(request, self.signature)
        models = self.step_models()
        if request.trace is not None:
            request.trace.mark("QUEUE_START", monotonic_ns())
        steps = EnsembleRequest(self.signature, request, batch, models)
        return steps, EnsembleEntry(self.statistics, self._in_flight, batch or 1, steps.timings, request.timings)

    def step_models(self) -> dict[int, InferModel]:
        """By step: the model that a request would run now. Raises PenstockError when one is gone."""
        host = self._context.host
        try:
            return {step.index: host.model(step.model, step.version) for step in self._plan.steps}
        except PenstockError as error:
            raise self._named(error) from error

    def _named(self, error: Exception) -> PenstockError:
        """The error of a step, with the ensemble's name, as Triton has it. The traceback of an unforeseen one is only
        in the log."""
        if not isinstance(error, PenstockError):
            logger.error("a request to ensemble '%s' failed", self.name, exc_info=error)
            error = EngineError("The server had an error while processing the request.")
        named = copy.copy(error)
        named.message = f"in ensemble '{self.name}', {error.message}"
        named.args = (named.message,)
        return named

    async def stop(self) -> None:
        """Waits for what was accepted. Cancelling it ends the wait: its requests end with their models."""
        self._stopping = True
        await self._in_flight.settled()

    async def settled(self) -> None:
        """Returns when the requests that run now have ended: they may need the models that they have begun with."""
        await self._in_flight.settled()
