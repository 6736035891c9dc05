"""One request to an ensemble: the requests of its steps, and what their answers become."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import NamedTuple

from penstock.classic.base import InferModel, paced
from penstock.classic.ensemble.plan import Step
from penstock.classic.ensemble.sequence import SequencePlace, first_of, place_of, told_by
from penstock.classic.ensemble.wiring import shapes_fit
from penstock.classic.messages import InferRequest, InferResponse, Timings
from penstock.classic.signature import ModelSignature
from penstock.classic.tensors import Tensor


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
class _Asked:
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
        signature, given = self._signature, self._request.inputs
        found = {}
        for name in signature.inputs:
            tensor = given.get(name)
            if tensor is not None and signature.reshapes_inputs:
                tensor = Tensor(name, tensor.datatype, signature.to_model(name, tensor.array))
            found[name] = Value(tensor, self._batch)
        return found

    async def infer(self, step: Step, values: Values) -> Values:
        """The outputs of a step that gives one response. Raises PenstockError."""
        asked = self._asked(step, values)
        try:
            response = await asked.model.infer(asked.request)
        finally:
            self._ended(asked)
        if response.error is not None:
            raise response.error
        return _outputs(asked, response)

    async def stream(self, step: Step, values: Values, take: Callable[[Values, bool], Awaitable[None]]) -> None:
        """Gives `take` the outputs of each response of a decoupled step, and whether it is the last one. Raises
        PenstockError."""
        asked = self._asked(step, values)
        try:
            with closing(paced(asked.model.stream(asked.request))) as responses:
                async for response in responses:
                    if response.error is not None:
                        raise response.error
                    if response.outputs is not None:
                        await take(_outputs(asked, response), response.final)
        finally:
            self._ended(asked)

    def response(self, values: Values, *, final: bool) -> InferResponse:
        """Of the ensemble: the outputs that the caller asked for. What no step has given is left out. As Triton's, it
        says to which sequence it belongs."""
        signature = self._signature
        found = []
        names = self._request.outputs or tuple(signature.outputs)
        for name in names:
            wanted = signature.outputs[name]
            dims = wanted.dims if wanted.reshape is None else wanted.reshape
            tensor = _fitted(values[name], dims, batched=self._batch > 0)
            if tensor is not None:
                found.append(Tensor(name, tensor.datatype, signature.to_client(name, tensor.array)))
        told = (values[name].sequence for name in names)
        sequence = first_of(told, place_of(self._request), f"ensemble '{signature.model}'")
        return InferResponse(found, sequence.parameters, final=final)

    def _asked(self, step: Step, values: Values) -> _Asked:
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
        told = (values[tensor].sequence for tensor in step.inputs.values())
        sequence = first_of(told, place_of(outer), f"model '{model.name}' in an ensemble")
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
        return _Asked(step, model, request, batch, time.monotonic())

    def _ended(self, asked: _Asked) -> None:
        if asked.request.trace is not None:
            asked.request.trace.mark("REQUEST_END", time.monotonic_ns())
            asked.request.trace.finish()
        if asked.request.caller is not None:
            asked.request.caller.called(asked.model.name, asked.started, time.monotonic())


def _outputs(asked: _Asked, response: InferResponse) -> Values:
    """Raises EngineError."""
    given = {tensor.name: tensor for tensor in response.outputs or ()}
    told = told_by(asked.model.name, asked.request, response.parameters) if response.parameters else None
    return {tensor: Value(given.get(name), asked.batch, told) for name, tensor in asked.step.outputs.items()}


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
