"""The protocol-neutral verbs of embedding and ranking models, beside the data plane of those that generate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from penstock.engines.encoder.text import TokenizedText, Vectors
from penstock.engines.errors import DeadlineExceededError, InvalidRequestError
from penstock.gateway.metrics.registry import Source
from penstock.gateway.models.language.dataplane import DataPlane, Usage
from penstock.gateway.models.pooling.model import PoolingModel
from penstock.gateway.requests.context import RequestContext, until
from penstock.gateway.requests.intake import WorkPool, WorkPools
from penstock.gateway.requests.record import Outcome, Stage, outcome_of

_T = TypeVar("_T")
_INLINE_COST = 4096
"""Characters that are encoded, and numbers that are written, on the event loop; more in a pool."""


class AcceptedCall(Protocol):
    """A request that a target has accepted."""

    def responded(self) -> None: ...
    def end(self, outcome: Outcome) -> None: ...


class PoolingRouting(Protocol):
    """For names that several models serve."""

    def has(self, name: str) -> bool: ...

    def names(self) -> list[tuple[str, PoolingModel]]: ...

    def find(self, name: str, context: RequestContext) -> PoolingModel:
        """The target for this request. Raises PenstockError."""
        ...

    def accepted(self, context: RequestContext) -> AcceptedCall:
        """The target that `find` has given gets the request."""
        ...


class PoolingPlane:
    def __init__(
        self, dataplane: DataPlane, *, request_timeout: float | None = None, text_pool: WorkPool | None = None
    ) -> None:
        self._dataplane = dataplane
        self._request_timeout = request_timeout
        self._text_pool = text_pool or WorkPools().text
        self._models: dict[str, PoolingModel] = {}
        self.routing: PoolingRouting | None = None
        """None while no name has several models."""

    def add(self, model: PoolingModel) -> None:
        """Known from now on, to be asked when it is loaded. Raises AlreadyExistsError."""
        for name in model.names:
            self._dataplane.models.reserve(
                name,
                f"The model `{name}` gives embeddings or scores and generates no text; see /v1/embeddings, /v1/rerank, "
                "/v1/score, /v1/classify.",
            )
            self._models[name] = model

    def known_models(self) -> list[PoolingModel]:
        """Of every model one, those that are still loading included."""
        return list(dict.fromkeys(self._models.values()))

    def loaded_names(self) -> list[tuple[str, PoolingModel]]:
        found = [(name, model) for name, model in self._models.items() if model.loaded]
        return found if self.routing is None else found + self.routing.names()

    def names_with(self, capabilities: Sequence[str]) -> list[Sequence[str]]:
        """The names of each model, and of rules for several models, with the first of these capabilities that any has;
        of all where there are none to have. Models that are still loading count where no other is there."""
        models = self.known_models()
        known = [(model.names, model) for model in ([each for each in models if each.loaded] or models)]
        routed = [] if self.routing is None else [([name], model) for name, model in self.routing.names()]
        for capability in capabilities:
            names = [names for names, model in (*known, *routed) if capability in model.capabilities]
            if names:
                return names
        return [] if capabilities else [names for names, _ in (*known, *routed)]

    def metrics(self) -> list[Source]:
        return [model.metrics for model in self.known_models()]

    @property
    def ready(self) -> bool:
        """True while all of them would serve a request now."""
        return all(model.source.ready for model in self.known_models())

    def model(self, name: str, context: RequestContext) -> PoolingModel:
        """Raises PermissionDeniedError, ModelNotFoundError, NotReadyError, and InvalidRequestError for a model that
        generates."""
        context.principal.require_model(name)
        if self.routing is not None and self.routing.has(name):
            return self.routing.find(name, context)
        return self.find_own(name)

    def has(self, name: str) -> bool:
        return name in self._models

    def find_own(self, name: str) -> PoolingModel:
        """The same for a name that is a model's own."""
        model = self._models.get(name)
        if model is None:
            self._dataplane.model(name)
            raise InvalidRequestError(
                f"The model `{name[:64]}` generates text and gives no embeddings or scores.", param="model"
            )
        if not model.loaded:
            raise self._dataplane.models.still_loading(model.names[0])
        return model

    async def rows(
        self,
        model: PoolingModel,
        tokenize: Callable[[], Sequence[TokenizedText]],
        num_chars: int,
        context: RequestContext,
    ) -> tuple[Vectors, Sequence[TokenizedText]]:
        """What the model gives for the texts that `tokenize` makes of `num_chars` characters. Raises PenstockError."""
        if self.routing is None or context.routed is None:
            return await self._rows(model, tokenize, num_chars, context)
        call = self.routing.accepted(context)
        try:
            found = await self._rows(model, tokenize, num_chars, context)
        except BaseException as error:
            call.end(outcome_of(error))
            raise
        call.responded()
        call.end(Outcome.OK)
        return found

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
