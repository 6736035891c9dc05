"""Public names as the KServe fronts see them: a model that looks like its first target, and the targets, whose requests
are counted, loaded for and, some of them, sent to a shadow as well."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from penstock.classic.base import AdmittedLater, CancellableStream, InferModel, ResponseStream, SaysReady, reports_ready
from penstock.classic.messages import InferRequest, InferResponse
from penstock.classic.model_config import ModelConfig
from penstock.classic.signature import ModelSignature
from penstock.classic.statistics import ModelStatistics
from penstock.classic.tensors import Tensor
from penstock.gateway.apis.kserve.store import ServedByModels
from penstock.gateway.apis.pooling.kserve_model import VectorModel
from penstock.gateway.configuration.traffic_rules import ShadowRule
from penstock.gateway.models.traffic.shadows import Result, Shadow, same_tensors
from penstock.gateway.models.traffic.table import PublicName, RoutedCall, TrafficTable
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.requests.record import Outcome, outcome_of

_LARGE = 1 << 16
"""Elements of an answer from which it is compared in a thread."""
_Answer = list[Tensor]


FindShadow = Callable[[RequestContext], Awaitable[InferModel]]
"""The shadow's model, loaded if need be. Raises PenstockError."""
Load = Callable[[InferRequest], Awaitable[tuple["TargetModel", Callable[[], None]]]]
"""A target that is loaded for a request, and what ends the use that it makes of it. Raises PenstockError."""


class TargetModel:
    """An InferModel."""

    def __init__(self, table: TrafficTable, name: PublicName, target: str, model: InferModel, find: FindShadow) -> None:
        self.model = model
        self.name = name.rule.name
        self._table = table
        self._public = name
        self._target = target
        self._find = find
        self._compared: tuple[InferModel, str | None] = model, None

    def unfit_beside(self, first: TargetModel) -> str | None:
        """Why requests for `first` cannot go to this one."""
        if self._compared[0] is not first.model:
            self._compared = first.model, _unfit(first.signature, self.signature, first.model.name)
        return self._compared[1]

    @property
    def version(self) -> int:
        return self.model.version

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def signature(self) -> ModelSignature:
        return self.model.signature

    @property
    def ready(self) -> bool:
        return self.model.ready

    @property
    def takes_infer(self) -> bool:
        return self.model.takes_infer

    @property
    def model_folder(self) -> Path | None:
        return self.model.model_folder

    @property
    def statistics(self) -> ModelStatistics:
        return self.model.statistics

    async def infer(self, request: InferRequest) -> InferResponse:
        call, shadow = self._begin(request)
        try:
            response = await self.model.infer(request)
        except BaseException as error:
            call.end(outcome_of(error))
            _tell(shadow, None)
            raise
        call.responded()
        call.end(Outcome.OK if response.error is None else outcome_of(response.error))
        _tell(shadow, response)
        return response

    def stream(self, request: InferRequest) -> ResponseStream:
        call, shadow = self._begin(request)
        try:
            responses = self.model.stream(request)
        except BaseException as error:
            call.end(outcome_of(error))
            _tell(shadow, None)
            raise
        return _CountedStream(responses, call, shadow)

    async def stop(self) -> None:
        """Nothing: the repository stops its models."""

    def _begin(self, request: InferRequest) -> tuple[RoutedCall, Shadow[_Answer] | None]:
        context = request.caller
        if isinstance(context, RequestContext):
            context.record.target = self._target
        return RoutedCall(self._table, self._public, self._target), self._shadow(request)

    def _shadow(self, request: InferRequest) -> Shadow[_Answer] | None:
        shadows, context = self._public.shadows, request.caller
        if shadows is None or not isinstance(context, RequestContext) or not shadows.wants(self._public.key(context)):
            return None
        if request.correlation_id or self.signature.decoupled or isinstance(self.model, VectorModel):
            shadows.results[Result.SKIPPED] += 1
            return None
        caller = shadows.context(request.tenant)
        return shadows.begin(caller, partial(_ask, self._find, request, caller), partial(_same, shadows.rule))


def _unfit(first: ModelSignature, other: ModelSignature, name: str) -> str | None:
    if any(getattr(first, item) != getattr(other, item) for item in ("batched", "decoupled", "sequences")):
        return f"it batches, streams or has sequences unlike '{name}'"
    for kind in ("inputs", "outputs"):
        ours, theirs = (
            {tensor.name: tensor.datatype for tensor in getattr(item, kind).values()} for item in (first, other)
        )
        if ours != theirs:
            return f"its {kind} are not those of '{name}'"
    return None


class OnDemandTarget(TargetModel):
    """A target that its request loads, or at least keeps from being unloaded."""

    def __init__(self, like: TargetModel, load: Load) -> None:
        """Looks like a target that is loaded."""
        self.name, self.model = like.name, like.model
        self._load = load

    async def infer(self, request: InferRequest) -> InferResponse:
        target, end = await self._load(request)
        try:
            return await target.infer(request)
        finally:
            end()

    def stream(self, request: InferRequest) -> ResponseStream:
        return _LateStream(request, self._load)


class _LateStream(CancellableStream, AdmittedLater):
    """The responses of a target that is loaded before the first of them."""

    def __init__(self, request: InferRequest, load: Load) -> None:
        self._request = request
        self._load = load
        self._responses: ResponseStream | None = None
        self._end: Callable[[], None] | None = None

    def __aiter__(self) -> _LateStream:
        return self

    async def __anext__(self) -> InferResponse:
        return await (await self._opened()).__anext__()

    async def admitted(self) -> None:
        responses = await self._opened()
        if isinstance(responses, AdmittedLater):
            await responses.admitted()

    async def _opened(self) -> ResponseStream:
        if self._responses is None:
            target, self._end = await self._load(self._request)
            self._responses = target.stream(self._request)
        return self._responses

    def ready(self) -> InferResponse | None:
        return None if self._responses is None else self._responses.ready()

    def cancel(self) -> bool:
        return isinstance(self._responses, CancellableStream) and self._responses.cancel()

    def close(self) -> None:
        if self._responses is not None:
            self._responses.close()
        if self._end is not None:
            self._end()
            self._end = None


async def _ask(find: FindShadow, request: InferRequest, caller: RequestContext) -> _Answer:
    """The shadow's answer to the same request, with the last place in every queue."""
    model = await find(caller)
    copy = replace(
        request,
        inputs=dict(request.inputs),
        parameters=dict(request.parameters),
        priority=model.config.dynamic_batching.priority_levels,
        deadline=caller.deadline,
        caller=caller,
        trace=None,
        timings=None,
    )
    response = await model.infer(copy)
    if response.error is not None:
        raise response.error
    return response.outputs or []


async def _same(rule: ShadowRule, answered: _Answer, other: _Answer) -> bool:
    if sum(tensor.array.size for tensor in answered) < _LARGE:
        return same_tensors(answered, other, rule)
    return await asyncio.to_thread(same_tensors, answered, other, rule)


def _tell(shadow: Shadow[_Answer] | None, response: InferResponse | None) -> None:
    if shadow is not None:
        shadow.answered(None if response is None or response.error is not None else response.outputs)


class _CountedStream(CancellableStream):
    """The responses of a target; the request ends with them, once."""

    def __init__(self, responses: ResponseStream, call: RoutedCall, shadow: Shadow[_Answer] | None) -> None:
        self._responses = responses
        self._call = call
        self._shadow = shadow
        self._outcome = Outcome.OK

    def __aiter__(self) -> _CountedStream:
        return self

    async def __anext__(self) -> InferResponse:
        try:
            return self._counted(await self._responses.__anext__())
        except StopAsyncIteration:
            self._end(self._outcome)
            raise
        except (Exception, asyncio.CancelledError) as error:
            self._end(outcome_of(error))
            raise

    def ready(self) -> InferResponse | None:
        response = self._responses.ready()
        return None if response is None else self._counted(response)

    def cancel(self) -> bool:
        return isinstance(self._responses, CancellableStream) and self._responses.cancel()

    def close(self) -> None:
        self._responses.close()
        self._end(Outcome.CANCELLED)

    def _counted(self, response: InferResponse) -> InferResponse:
        if response.error is not None:
            self._outcome = outcome_of(response.error)
        else:
            self._call.responded()
            if response.outputs is not None:
                _tell(self._shadow, response)
        if response.final:
            self._end(self._outcome)
        return response

    def _end(self, outcome: Outcome) -> None:
        self._call.end(outcome)
        _tell(self._shadow, None)


class PublicModel(TargetModel, ServedByModels, SaysReady):
    """A public name before a request is there: looks like the first of its targets that is there."""

    def __init__(self, targets: list[TargetModel]) -> None:
        """At least one."""
        self._targets = targets
        self.name, self.model = targets[0].name, targets[0].model

    def serving_models(self) -> list[InferModel]:
        return [target.model for target in self._targets]

    @property
    def config(self) -> ModelConfig:
        """Under the public name."""
        config = ModelConfig()
        config.CopyFrom(self.model.config)
        config.name = self.name
        return config

    @property
    def ready(self) -> bool:
        return True

    @property
    def says_ready(self) -> bool:
        return any(map(reports_ready, self.serving_models()))

    async def infer(self, request: InferRequest) -> InferResponse:
        """Of the first target, for callers that have not let the store choose."""
        return await self._targets[0].infer(request)

    def stream(self, request: InferRequest) -> ResponseStream:
        return self._targets[0].stream(request)
