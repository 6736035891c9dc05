"""The protocol-neutral verbs of embedding and ranking models, beside the data plane of those that generate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from penstock.engines.encoder.text import TokenizedText, Vectors
from penstock.engines.errors import DeadlineExceededError
from penstock.gateway.metrics.registry import Source
from penstock.gateway.models.catalogue import Catalogue
from penstock.gateway.models.entries import Kind
from penstock.gateway.models.language.generation import Usage
from penstock.gateway.models.pooling.model import PoolingModel
from penstock.gateway.requests.context import RequestContext, until
from penstock.gateway.requests.intake import WorkPool, WorkPools
from penstock.gateway.requests.record import Outcome, Stage, outcome_of

_T = TypeVar("_T")
_INLINE_COST = 4096
"""Characters that are encoded, and numbers that are written, on the event loop; more in a pool."""


class PoolingPlane:
    """`models`: the server's names, as the data plane has them."""

    def __init__(
        self, models: Catalogue, *, request_timeout: float | None = None, text_pool: WorkPool | None = None
    ) -> None:
        self.models = models
        self._request_timeout = request_timeout
        self._text_pool = text_pool or WorkPools().text

    def metrics(self) -> list[Source]:
        return [model.metrics for model in self.models.pooling_models()]

    @property
    def ready(self) -> bool:
        """True while all of them would serve a request now."""
        return all(model.source.ready for model in self.models.pooling_models())

    def model(self, name: str, context: RequestContext) -> PoolingModel:
        """That of the request. Raises PermissionDeniedError, ModelNotFoundError, NotReadyError, and InvalidRequestError
        for a model that generates."""
        served = self.models.resolved(name, Kind.SCORES, context).served
        assert isinstance(served, PoolingModel)
        return served

    async def rows(
        self,
        model: PoolingModel,
        tokenize: Callable[[], Sequence[TokenizedText]],
        num_chars: int,
        context: RequestContext,
    ) -> tuple[Vectors, Sequence[TokenizedText]]:
        """What the model gives for the texts that `tokenize` makes of `num_chars` characters. Raises PenstockError."""
        traffic = self.models.traffic
        if traffic is None or context.routed is None:
            return await self._rows(model, tokenize, num_chars, context)
        call = traffic.accepted_rows(context)
        try:
            rows = await self._rows(model, tokenize, num_chars, context)
        except BaseException as error:
            call.end(outcome_of(error))
            raise
        call.responded()
        call.end(Outcome.OK)
        return rows

    async def _rows(
        self,
        model: PoolingModel,
        tokenize: Callable[[], Sequence[TokenizedText]],
        num_chars: int,
        context: RequestContext,
    ) -> tuple[Vectors, Sequence[TokenizedText]]:
        record = context.record
        record.model = record.model if record.target else model.names[0]
        if self._request_timeout is not None and not context.background:
            context.limit(self._request_timeout)
        too_late = DeadlineExceededError("The request's deadline passed before all of its texts were computed.")
        async with until(context.deadline, too_late):
            record.enter(Stage.TOKENIZE)
            texts = await self.in_pool(num_chars, tokenize)
            total = sum(map(len, texts))
            context.pay_tokens(total)
            record.enter(Stage.ENGINE)
            rows = await model.source.rows(texts, context)
        record.usage = Usage(prompt_tokens=total)
        return rows, texts

    async def in_pool(self, cost: int, work: Callable[[], _T]) -> _T:
        """On the event loop where it is little. Raises OverloadedError."""
        return work() if cost <= _INLINE_COST else await self._text_pool.run(cost, work)
