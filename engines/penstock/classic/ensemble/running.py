"""A request to an ensemble: the requests of its steps (each runs as soon as its inputs are there), the responses of
decoupled ones in turn, and the sequence that each belongs to.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

from penstock.classic.base import InferModel, paced
from penstock.classic.ensemble.plan import Flow, Selection, Step
from penstock.classic.ensemble.wiring import EnsembleStage, shapes_fit
from penstock.classic.messages import InferRequest, InferResponse, Parameter, Timings
from penstock.classic.signature import ModelSignature
from penstock.classic.tensors import Tensor
from penstock.engines.errors import EngineError

logger = logging.getLogger(__name__)

_ID, _START, _END = "sequence_id", "sequence_start", "sequence_end"


class SequencePlace(NamedTuple):
    """What a request says of its sequence."""

    id: int | str
    """0 or "" for none."""
    start: bool
    end: bool

    @property
    def parameters(self) -> dict[str, Parameter]:
        """Of a response, in Triton's names."""
        return {_ID: self.id, _START: self.start, _END: self.end}


def place_of(request: InferRequest) -> SequencePlace:
    return SequencePlace(request.correlation_id, request.sequence_start, request.sequence_end)


def told_by(model: str, request: InferRequest, parameters: Mapping[str, Parameter]) -> SequencePlace | None:
    """What a response's parameters say, which holds for all that is made of it; None where they say nothing. Raises
    EngineError for values of the wrong type."""
    if not (_ID in parameters or _START in parameters or _END in parameters):
        return None
    before = place_of(request)
    number = parameters.get(_ID, before.id)
    flags = parameters.get(_START, before.start), parameters.get(_END, before.end)
    if (
        isinstance(number, bool)
        or not isinstance(number, int | str)
        or not all(isinstance(flag, bool) for flag in flags)
    ):
        raise EngineError(
            f"model '{model}' gives an invalid sequence for its response: {_ID} must be an integer or a text,"
            f" {_START} and {_END} must be true or false"
        )
    return SequencePlace(number, bool(flags[0]), bool(flags[1]))


def first_place(places: Iterable[SequencePlace | None], usual: SequencePlace, of_what: str) -> SequencePlace:
    """As in Triton, of several different ones the first holds, and the log says so."""
    first: SequencePlace | None = None
    for place in places:
        if place is None or place == first:
            continue
        if first is None:
            first = place
        else:
            logger.error("%s has inputs of different sequences, %s and %s: the first holds", of_what, first, place)
    return usual if first is None else first


class Value(NamedTuple):
    """A tensor between steps."""

    tensor: Tensor | None
    """None: its producer left it out, or the caller an optional input."""
    batch: int
    """The batch size of the request that it belongs to; 0 where that has no batch dimension."""
    sequence: SequencePlace | None = None
    """What its producer's response says; None: nothing."""


Values = Mapping[str, Value]
"""By the names of the ensemble's tensors."""


@dataclass(frozen=True, slots=True)
class _StepRequest:
    """A step's request."""

    step: Step
    model: InferModel
    request: InferRequest
    batch: int
    started: float


class EnsembleRequest:
    """A request and the models that its steps run, which are the same ones to its end."""

    def __init__(
        self, signature: ModelSignature, request: InferRequest, batch: int, models: Mapping[int, InferModel]
    ) -> None:
        """`models` by the index of their step."""
        self.timings = Timings()
        """What the steps have taken together."""
        self._signature = signature
        self._request = request
        self._batch = batch
        self._models = models

    def inputs(self) -> Values:
        """Those of the ensemble: what the first steps take."""
        signature, tensors = self._signature, self._request.inputs
        values = {}
        for name in signature.inputs:
            tensor = tensors.get(name)
            if tensor is not None and signature.reshapes_inputs:
                tensor = Tensor(name, tensor.datatype, signature.to_model(name, tensor.array))
            values[name] = Value(tensor, self._batch)
        return values

    async def infer(self, step: Step, values: Values) -> Values:
        """The outputs of a step that gives one response. Raises PenstockError."""
        request = self._step_request(step, values)
        try:
            response = await request.model.infer(request.request)
        finally:
            self._ended(request)
        if response.error is not None:
            raise response.error
        return _outputs(request, response)

    async def stream(self, step: Step, values: Values, take: Callable[[Values, bool], Awaitable[None]]) -> None:
        """Gives `take` the outputs of each response of a decoupled step, and whether it is the last one. Raises
        PenstockError."""
        request = self._step_request(step, values)
        try:
            with closing(paced(request.model.stream(request.request))) as responses:
                async for response in responses:
                    if response.error is not None:
                        raise response.error
                    if response.outputs is not None:
                        await take(_outputs(request, response), response.final)
        finally:
            self._ended(request)

    def response(self, values: Values, *, final: bool) -> InferResponse:
        """Of the ensemble: the outputs that the caller asked for. What no step has given is left out. As Triton's, it
        says to which sequence it belongs."""
        signature = self._signature
        outputs = []
        names = self._request.outputs or tuple(signature.outputs)
        for name in names:
            expected = signature.outputs[name]
            dims = expected.dims if expected.reshape is None else expected.reshape
            tensor = _fitted(values[name], dims, batched=self._batch > 0)
            if tensor is not None:
                outputs.append(Tensor(name, tensor.datatype, signature.to_client(name, tensor.array)))
        places = (values[name].sequence for name in names)
        sequence = first_place(places, place_of(self._request), f"ensemble '{signature.model}'")
        return InferResponse(outputs, sequence.parameters, final=final)

    def _step_request(self, step: Step, values: Values) -> _StepRequest:
        """As in Triton, each step is told what the caller has said: id, priority, time-out, sequence, parameters. What
        its inputs' producers have said of the sequence goes before that."""
        model = self._models[step.index]
        signature = model.signature
        inputs = {}
        for name, tensor in step.inputs.items():
            fitted = _fitted(values[tensor], signature.inputs[name].dims, batched=signature.batched)
            if fitted is not None:
                inputs[name] = Tensor(name, fitted.datatype, fitted.array)
        outer = self._request
        places = (values[tensor].sequence for tensor in step.inputs.values())
        sequence = first_place(places, place_of(outer), f"model '{model.name}' in an ensemble")
        request = InferRequest(
            inputs=inputs,
            id=outer.id,
            outputs=tuple(step.outputs),
            parameters=outer.parameters,
            priority=outer.priority,
            timeout_us=outer.timeout_us,
            deadline=outer.deadline,
            correlation_id=sequence.id,
            sequence_start=sequence.start,
            sequence_end=sequence.end,
            tenant=outer.tenant,
            caller=outer.caller,
            trace=outer.trace and outer.trace.child(model.name, model.version),
            timings=self.timings,
            asked_in=outer.asked_in,
        )
        batch = 0
        if signature.batched:
            batch = next((len(tensor.array) for tensor in inputs.values() if tensor.array.ndim), 1)
        return _StepRequest(step, model, request, batch, time.monotonic())

    def _ended(self, request: _StepRequest) -> None:
        if request.request.trace is not None:
            request.request.trace.mark("REQUEST_END", time.monotonic_ns())
            request.request.trace.finish()
        if request.request.caller is not None:
            request.request.caller.called(request.model.name, request.started, time.monotonic())


def _outputs(request: _StepRequest, response: InferResponse) -> Values:
    """Raises EngineError."""
    tensors = {tensor.name: tensor for tensor in response.outputs or ()}
    place = told_by(request.model.name, request.request, response.parameters) if response.parameters else None
    return {tensor: Value(tensors.get(name), request.batch, place) for name, tensor in request.step.outputs.items()}


def _fitted(value: Value, dims: Sequence[int], *, batched: bool) -> Tensor | None:
    """A view of the tensor for a model with these dims. Between models with and without batches Triton's rules hold:
    a batch of one is added or taken away where that makes the shape fit."""
    tensor = value.tensor
    if tensor is None or batched == (value.batch > 0):
        return tensor
    shape = tensor.array.shape
    fits = shapes_fit(dims, shape)
    if batched and fits:
        return Tensor(tensor.name, tensor.datatype, tensor.array.reshape((1, *shape)))
    if not batched and not fits and value.batch == 1:
        return Tensor(tensor.name, tensor.datatype, tensor.array.reshape(shape[1:]))
    return tensor


IsLast = Callable[[], bool]
"""Whether no other results will follow, as far as is known now: a step may end long after its last response."""
Emit = Callable[[Values, IsLast], Awaitable[None]]
"""Takes the results of the last stage."""
Infer = Callable[[Step, Values], Awaitable[Values]]
"""The outputs of a step that gives one response."""


async def run_steps(selection: Selection, inputs: Values, infer: Infer) -> Values:
    """The results of a selection. Steps in a row need no task of their own.

    Raises what `infer` raises first; the steps that still run are cancelled and have ended then.
    """
    flow = Flow[Value](selection)
    ready = flow.put(inputs)
    try:
        async with asyncio.TaskGroup() as group:
            for step in ready[1:]:
                group.create_task(_follow(step, flow, infer, group))
            if ready:
                await _follow(ready[0], flow, infer, group)
    except BaseExceptionGroup as errors:
        raise first_of(errors) from None
    return flow.tensors


async def _follow(step: Step, flow: Flow[Value], infer: Infer, group: asyncio.TaskGroup) -> None:
    """A step and what it makes ready; the others of that in tasks of their own."""
    following: list[Step] = [step]
    while following:
        step, *rest = following
        for other in rest:
            group.create_task(_follow(other, flow, infer, group))
        following = flow.put(await infer(step, flow.take(step)))


async def run_stages(
    request: EnsembleRequest, stages: Sequence[EnsembleStage], inputs: Values, width: int, emit: Emit
) -> None:
    """Emits the results for each response of the last decoupled step, in the order of the responses that they are made
    of. At most `width` responses of a step are on their way at the same time; it is read no further until then.

    Raises what a step raises first; the steps that still run are cancelled and have ended then.
    """
    await _Stages(request, stages, width).run(0, inputs, lambda: True, emit)


class _Stages:
    def __init__(self, request: EnsembleRequest, stages: Sequence[EnsembleStage], width: int) -> None:
        self._request = request
        self._stages = stages
        self._width = width

    async def run(self, number: int, inputs: Values, is_last: IsLast, emit: Emit) -> None:
        """`is_last`: of what this stage is run for."""
        stage = self._stages[number]
        values = await run_steps(stage.selection, inputs, self._request.infer) if stage.selection.steps else inputs
        if stage.stream is None:
            await emit(values, is_last)
        elif self._stages[number + 1] is self._stages[-1] and not self._stages[-1].selection.steps:
            await self._request.stream(
                stage.stream, values, lambda outputs, final: emit(outputs, lambda: final and is_last())
            )
        else:
            await self._fan_out(number, stage.stream, values, is_last, emit)

    async def _fan_out(self, number: int, step: Step, values: Values, is_last: IsLast, emit: Emit) -> None:
        """Each response goes through the next stage in a task of its own, and emits when those before it have ended. As
        in Triton, the last one is known as such if the step has ended when it emits."""
        slots = asyncio.Semaphore(self._width)
        newest: asyncio.Event | None = None
        over = False

        async def one(outputs: Values, before: asyncio.Event | None, ended: asyncio.Event) -> None:
            async def in_turn(results: Values, is_last: IsLast) -> None:
                if before is not None:
                    await before.wait()
                await emit(results, is_last)

            await self.run(number + 1, outputs, lambda: over and newest is ended and is_last(), in_turn)
            if before is not None:
                await before.wait()
            ended.set()
            slots.release()

        async def take(outputs: Values, final: bool) -> None:
            nonlocal newest, over
            await slots.acquire()
            before, newest, over = newest, asyncio.Event(), final
            group.create_task(one(outputs, before, newest))

        try:
            async with asyncio.TaskGroup() as group:
                await self._request.stream(step, values, take)
                over = True
        except BaseExceptionGroup as errors:
            raise first_of(errors) from None


def first_of(errors: BaseExceptionGroup) -> BaseException:
    """The error that ended a group of tasks; what it brought about in others came later."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
