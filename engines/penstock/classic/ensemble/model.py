"""An ensemble as a model: requests in, the responses of its last steps out."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from time import monotonic_ns

from penstock.classic.base import InferModel, ModelContext
from penstock.classic.ensemble.books import Entry
from penstock.classic.ensemble.in_flight import InFlight
from penstock.classic.ensemble.plan import make_plan
from penstock.classic.ensemble.request import EnsembleRequest, Values
from penstock.classic.ensemble.running import IsLast, run_stages, run_steps
from penstock.classic.ensemble.stream import EnsembleStream, Give
from penstock.classic.ensemble.wiring import wire
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.model_config import ModelConfig
from penstock.classic.signature import ModelSignature
from penstock.classic.statistics import ModelStatistics
from penstock.classic.validation import check_request
from penstock.engines.errors import CancelledError, EngineError, NotReadyError, PenstockError, UnsupportedError

logger = logging.getLogger(__name__)

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
            found = await run_steps(self._wiring.selection(request.outputs), steps.inputs(), steps.infer)
            response = steps.response(found, final=True)
        except PenstockError as error:
            entry.failed(error)
            raise self._told(error) from error
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
                await give(InferResponse(None, error=self._told(error)))
                return
            if open_end:
                entry.responded()
                entry.succeeded()
                await give(InferResponse(None))

        return EnsembleStream(produce, lambda: entry.failed(CancelledError("the request was cancelled")))

    def _begun(self, request: InferRequest) -> tuple[EnsembleRequest, Entry]:
        """Raises PenstockError: a refusal."""
        if self._stopping:
            raise NotReadyError(f"model '{self.name}' is being unloaded")
        batch = check_request(request, self.signature)
        models = self.step_models()
        if request.trace is not None:
            request.trace.mark("QUEUE_START", monotonic_ns())
        steps = EnsembleRequest(self.signature, request, batch, models)
        return steps, Entry(self.statistics, self._in_flight, batch or 1, steps.timings, request.timings)

    def step_models(self) -> dict[int, InferModel]:
        """By step: the model that a request would run now. Raises PenstockError when one is gone."""
        host = self._context.host
        try:
            return {step.index: host.model(step.model, step.version) for step in self._plan.steps}
        except PenstockError as error:
            raise self._told(error) from error

    def _told(self, error: Exception) -> PenstockError:
        """The error of a step, with the ensemble's name, as Triton has it. The traceback of an unforeseen one is only
        in the log."""
        if not isinstance(error, PenstockError):
            logger.error("a request to ensemble '%s' failed", self.name, exc_info=error)
            error = EngineError("The server had an error while processing the request.")
        told = copy.copy(error)
        told.message = f"in ensemble '{self.name}', {error.message}"
        told.args = (told.message,)
        return told

    async def stop(self) -> None:
        """Waits for what was accepted. Cancelling it ends the wait: its requests end with their models."""
        self._stopping = True
        await self._in_flight.settled()

    async def settled(self) -> None:
        """Returns when the requests that run now have ended: they may need the models that they have begun with."""
        await self._in_flight.settled()
