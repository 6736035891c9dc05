"""Public names for the APIs of texts and vectors: which target a request goes to, whatever kind of model that is.

A target is a model of this server, loaded or to be loaded by the request, or a model of another server. It is chosen
once, noted in the request's context, and from there on the request is handled as one for that model.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import ClassVar, Generic, NamedTuple, TypeVar, cast

import msgspec

from penstock.engines.errors import InvalidRequestError, ModelNotFoundError, NotReadyError, PenstockError
from penstock.gateway.apis.kserve.store import ModelStore
from penstock.gateway.configuration.traffic_rules import Target
from penstock.gateway.generating.endpoint import OtherAnswer, OtherChat, OtherModel
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.models.language.generate_request import GenerateRequest
from penstock.gateway.models.language.kserve.language_model import LanguageModel
from penstock.gateway.models.language.models import NameHolder
from penstock.gateway.models.language.prompts import ChatValues
from penstock.gateway.models.on_demand.on_demand import OnDemand
from penstock.gateway.models.pooling.model import PoolingModel
from penstock.gateway.models.pooling.plane import PoolingPlane
from penstock.gateway.models.traffic.shadows import Result
from penstock.gateway.models.traffic.table import Choice, PublicName, RoutedCall, TrafficTable, choice_in
from penstock.gateway.models.traffic.text_shadows import AskInside, LanguageCall, begin_shadow, begin_text_shadow
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.requests.record import Outcome, outcome_of
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.text_models import TextModel, TextModels

_M = TypeVar("_M")


class Available(NamedTuple, Generic[_M]):
    """A target that would serve a request now; with neither of both, its first request loads it."""

    own: _M | None = None
    upstream: TextModel | None = None


class Routing(ABC, Generic[_M]):
    """One kind of models of this server, and those of other servers that do the same."""

    passes_over_others: ClassVar[bool]
    """Targets of another kind get no requests; else they are an error."""

    def __init__(self, table: TrafficTable, texts: TextModels) -> None:
        self._table = table
        self._texts = texts
        self.ask_inside: AskInside | None = None
        """For shadows of requests that another server answers, or is to answer as well; None: they have none."""

    @abstractmethod
    def resolve(self, target: Target) -> _M:
        """A model of this server. Raises ModelNotFoundError and NotReadyError, and InvalidRequestError for a model of
        another kind."""

    @abstractmethod
    def own(self, target: Target) -> _M | None:
        """As `resolve`, for one that is ready; None for a model that a request would load."""

    @abstractmethod
    def upstream(self, target: Target) -> TextModel | None:
        """The model of another server that the target is."""

    def available(self, public: PublicName) -> dict[str, Available[_M]]:
        """By id. Raises InvalidRequestError where a target is of another kind, unless those are passed over."""
        found: dict[str, Available[_M]] = {}
        missing: dict[str, str] = {}
        for target in public.rule.targets:
            try:
                upstream = self.upstream(target)
                found[target.id] = Available(None if upstream else self.own(target), upstream)
            except PenstockError as error:
                if type(error) is InvalidRequestError and not self.passes_over_others:
                    raise
                missing[target.id] = error.message
        public.unavailable = missing
        return found

    def first(self, name: str) -> Available[_M]:
        """What describes a public name: its first target that is loaded, or else the first one. Raises PenstockError
        where none would serve a request."""
        found = list(self.available(self._table.names[name]).values())
        if not found:
            raise NotReadyError(f"The model `{name[:64]}` has no target to answer.", retry_after=2)
        return next((each for each in found if each.own is not None), found[0])

    def choose(self, name: str, context: RequestContext, api: str | None = None) -> Choice:
        """The same at each call for a request, even if the rule was removed meanwhile. `api`: by which models of other
        servers would be asked; None: they cannot be. Raises PenstockError."""
        known = context.routed
        if isinstance(known, Choice) and known.name == name:
            return known
        public = self._table.names[name]
        context.principal.require_model(name)
        found = self.available(public)
        able = [id for id, each in found.items() if each.upstream is None or api in each.upstream.apis]
        if found and not able:
            if api is None:  # says what models of other servers cannot do
                self.resolve(public.route.targets[next(iter(found))])
            able = list(found)  # the model that is chosen says what it can
        chosen = public.route.choose(public.key(context), found, self._table.clock(), able)
        if chosen is None:
            reasons = " ".join(public.unavailable.values()) or "None with a share of the requests is available."
            raise NotReadyError(f"The model `{name[:64]}` has no target to answer. {reasons}", retry_after=2)
        context.routed = choice = Choice(public, public.route.targets[chosen])
        context.record.model, context.record.target = name, chosen
        return choice

    def text_model(self, name: str, context: RequestContext, api: str, body: bytes | None) -> TextModel | None:
        """As TextRouting has it. Nothing is chosen yet where no model of another server is concerned."""
        rule = self._table.names[name].rule
        concerned = (Target(name), *rule.targets, *(() if rule.shadow is None else (rule.shadow,)))
        if not any(map(self.upstream, concerned)):
            return None
        choice = self.choose(name, context, api)
        if body is not None and choice.public.shadows is not None and api != "embeddings":
            choice.body = api, body
        model = self.upstream(choice.target)
        return None if model is None else RoutedText(self._table, choice, model, self.ask_inside)


class LanguageRouting(Routing[NameHolder]):
    """Implements NameRouting."""

    passes_over_others = False

    def __init__(
        self,
        table: TrafficTable,
        texts: TextModels,
        dataplane: DataPlane,
        models: ModelStore,
        on_demand: OnDemand | None,
    ) -> None:
        super().__init__(table, texts)
        self._dataplane = dataplane
        self._models = models
        self._on_demand = on_demand

    def has(self, name: str) -> bool:
        return name in self._table.names

    def resolve(self, target: Target) -> NameHolder:
        version = "" if target.version is None else str(target.version)
        if not version and (self._dataplane.models.holder(target.model) or not self._models.versions(target.model)):
            return self._dataplane.models.find_own(target.model)
        model = self._models.model(target.model, version)
        if not isinstance(model, LanguageModel):
            raise InvalidRequestError(f"The model `{target.id}` generates no text.", param="model")
        return NameHolder(model.loaded_model)

    def own(self, target: Target) -> NameHolder | None:
        try:
            holder = self.resolve(target)
        except (ModelNotFoundError, NotReadyError):
            if self._on_demand is not None and self._on_demand.would_load(target.model, generates=True):
                return None
            raise
        if not holder.model.ready:
            raise NotReadyError(f"The model `{target.id}` is not ready.", retry_after=2)
        return holder

    def upstream(self, target: Target) -> TextModel | None:
        is_upstream = target.version is None and self._dataplane.models.is_reserved(target.model)
        model = self._texts.by_name.get(target.model) if is_upstream else None
        return None if model is None or model.apis == ("embeddings",) else model

    def described(self) -> list[tuple[str, Available[NameHolder]]]:
        """The names that serve texts now, without those that are a model's own name as well, each with what describes
        it."""
        found = []
        for name in sorted(self._table.names):
            if self._dataplane.models.holder(name) is None and name not in self._texts.by_name:
                with suppress(InvalidRequestError, NotReadyError):
                    found.append((name, self.first(name)))
        return found

    def names(self) -> list[str]:
        return [name for name, first in self.described() if first.own is not None]

    def names_on_demand(self) -> list[str]:
        return [name for name, first in self.described() if first == Available()]

    def find(self, name: str, context: RequestContext | None) -> NameHolder:
        if context is not None and context.routed is not None and context.routed.name == name:
            return self.resolve(choice_in(context).target)
        if not self.has(name):
            return self._dataplane.models.find_own(name)
        if context is not None:
            return self.resolve(self.choose(name, context).target)
        first = self.first(name)
        if first.own is not None:
            return first.own
        if first.upstream is not None:
            raise InvalidRequestError(f"The model `{name[:64]}` is another server's.", param="model")
        raise NotReadyError(f"No target of the model `{name[:64]}` is loaded.", retry_after=2)

    def model_to_load(self, name: str, context: RequestContext) -> str:
        return self.choose(name, context).target.model

    def rendered(self, context: RequestContext, values: ChatValues, *, cut: bool) -> None:
        if isinstance(context.routed, Choice):
            context.routed.chat = values, cut

    def accepted(self, request: GenerateRequest) -> LanguageCall:
        choice = choice_in(request.context)
        call = choice.call(self._table)
        rule = choice.public.rule.shadow
        if choice.is_shadow or rule is None:
            return LanguageCall(call)
        if self.upstream(rule) is not None:
            return LanguageCall(call, *begin_text_shadow(choice, request.context, self.ask_inside))
        tokenizer = self.resolve(choice.target).model.tokenizer
        return LanguageCall(call, *begin_shadow(self._dataplane, self._shadow, choice, request, tokenizer))

    async def _shadow(self, target: Target, context: RequestContext) -> NameHolder:
        """Which is loaded first if need be. Raises PenstockError."""
        if self._on_demand is not None and self.own(target) is None:
            await self._on_demand.use_allowed(target.model, context)
        return self.resolve(target)


class EmbeddingRouting(Routing[PoolingModel]):
    """Implements PoolingRouting."""

    passes_over_others = True

    def __init__(self, table: TrafficTable, texts: TextModels, pooling: PoolingPlane) -> None:
        super().__init__(table, texts)
        self._pooling = pooling

    def has(self, name: str) -> bool:
        """Whether one of the name's targets is a model of this server that gives vectors or scores."""
        public = self._table.names.get(name)
        return public is not None and any(self._pooling.has(target.model) for target in public.rule.targets)

    def names(self) -> list[tuple[str, PoolingModel]]:
        """Of those that are served now, without those that are a model's own name as well."""
        found = []
        for name in sorted(self._table.names):
            if self.has(name) and not self._pooling.has(name):
                with suppress(NotReadyError):
                    first = self.first(name).own
                    found += [] if first is None else [(name, first)]
        return found

    def find(self, name: str, context: RequestContext) -> PoolingModel:
        return self.resolve(self.choose(name, context).target)

    def resolve(self, target: Target) -> PoolingModel:
        if target.version is not None:
            raise InvalidRequestError(f"The model `{target.id}`: embedding models have no versions.", param="model")
        return self._pooling.find_own(target.model)

    def own(self, target: Target) -> PoolingModel:
        model = self.resolve(target)
        if not model.source.ready:
            raise NotReadyError(f"The model `{target.id}` is not ready.", retry_after=2)
        return model

    def upstream(self, target: Target) -> TextModel | None:
        model = self._texts.by_name.get(target.model) if target.version is None else None
        return model if model is not None and "embeddings" in model.apis else None

    def accepted(self, context: RequestContext) -> RoutedCall:
        choice = choice_in(context)
        shadows = choice.public.shadows
        if shadows is not None and shadows.wants(choice.public.key(context)):
            shadows.results[Result.SKIPPED] += 1
        return choice.call(self._table)


class RoutedText:
    """A model of another server as the target of a request. Implements TextModel and OtherModel."""

    def __init__(self, table: TrafficTable, choice: Choice, model: TextModel, ask_inside: AskInside | None) -> None:
        self.apis, self.created, self.root = model.apis, model.created, model.root
        self.owner, self.folder = model.owner, model.folder
        self._table = table
        self._choice = choice
        self._model = model
        self._ask_inside = ask_inside

    async def answer(self, exchange: Exchange, api: str, body: bytes) -> bytes | None:
        with self._counted(exchange.context) as call:
            rest = await self._model.answer(exchange, api, body)
            if rest is not None:
                _goes_to_own_model(call, exchange.context)
        return rest

    @asynccontextmanager
    async def chat(
        self, exchange: Exchange, chat: OtherChat, *, pulse: float | None
    ) -> AsyncIterator[OtherAnswer | str]:
        """As OtherModel has it."""
        model = cast("OtherModel", self._model)
        if self._choice.public.shadows is not None:
            self._choice.body = "chat", msgspec.json.encode({**chat.fields, "model": self._choice.name})
        with self._counted(exchange.context) as call:
            async with model.chat(exchange, chat, pulse=pulse) as answer:
                if isinstance(answer, str):
                    _goes_to_own_model(call, exchange.context)
                yield answer

    @contextmanager
    def _counted(self, context: RequestContext) -> Iterator[LanguageCall]:
        choice, began = self._choice, time.monotonic()
        call = LanguageCall(choice.call(self._table), *begin_text_shadow(choice, context, self._ask_inside))
        choice.listener = call.listener
        try:
            yield call
        except BaseException as error:
            call.end(outcome_of(error))
            raise
        if choice.is_shadow or context.record.target == choice.target.id:
            first = context.record.first_token_at
            call.responded(None if first is None else first - began)
            call.end(Outcome.OK)
        call.end(Outcome.SERVER_ERROR)  # one of its fallbacks has answered


def _goes_to_own_model(call: LanguageCall, context: RequestContext) -> None:
    """The fallback answers under its own name, and counts there."""
    call.end(Outcome.SERVER_ERROR)
    context.routed = None
