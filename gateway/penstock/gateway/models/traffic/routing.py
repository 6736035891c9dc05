"""Public names with traffic rules: which target a request goes to, whatever kind of model that is.

A target is a model of this server, loaded or to be loaded by the request, or a model of another server. It is chosen
once, noted in the request's context, and from there on the request is handled as one for that model.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

import msgspec

from penstock.engines.errors import InvalidRequestError, ModelNotFoundError, NotReadyError, PenstockError
from penstock.gateway.configuration.traffic_rules import Target
from penstock.gateway.models.entries import Kind, Served, Upstream, UpstreamAnswer, UpstreamChat, upstream_of
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.models.language.generate_request import GenerateRequest
from penstock.gateway.models.language.kserve.language_model import LanguageModel
from penstock.gateway.models.language.models import NameHolder
from penstock.gateway.models.language.prompts import ChatValues
from penstock.gateway.models.on_demand.on_demand import OnDemand
from penstock.gateway.models.pooling.model import PoolingModel
from penstock.gateway.models.traffic.shadows import Result
from penstock.gateway.models.traffic.store import TrafficStore
from penstock.gateway.models.traffic.table import PublicName, TargetChoice, TrafficTable, choice_in
from penstock.gateway.models.traffic.text_shadows import AskInside, LanguageCall, begin_shadow, begin_text_shadow
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.requests.record import Outcome, outcome_of
from penstock.gateway.transports.http.exchange import Exchange


class TrafficRouting:
    """Implements Traffic. Targets are models and their versions, never public names: no circles."""

    def __init__(
        self,
        table: TrafficTable,
        dataplane: DataPlane,
        tensors: TrafficStore,
        on_demand: OnDemand | None = None,
    ) -> None:
        """`tensors`: the same names as KServe has them."""
        self._table = table
        self._dataplane = dataplane
        self._models = dataplane.models
        self._tensors = tensors
        self._on_demand = on_demand
        self.ask_inside: AskInside | None = None
        """For shadows of requests that another server answers, or is to answer as well; None: they have none."""

    def has(self, name: str) -> bool:
        return name in self._table.names

    # Which target

    def target(self, name: str, kind: Kind, context: RequestContext) -> Target:
        choice = context.routed
        if not (isinstance(choice, TargetChoice) and choice.name == name):
            choice = self._choose(self._table.names[name], kind, context)
        return choice.target

    def _choose(self, public: PublicName, kind: Kind, context: RequestContext) -> TargetChoice:
        available = self._available(public, kind)
        upstreams = {id: upstream_of(served) for id, served in available.items()}
        able = [id for id, upstream in upstreams.items() if upstream is None or kind.api in upstream.apis]
        if available and not able:
            if kind.api is None:
                self._resolve(public.route.targets[next(iter(available))], kind)  # says what other servers cannot do
            able = list(available)  # the model that is chosen says what it can
        name = public.rule.name
        chosen = public.route.choose(public.key(context), available, self._table.clock(), able)
        if chosen is None:
            reasons = " ".join(public.unavailable.values()) or "None with a share of the requests is available."
            raise NotReadyError(f"The model `{name[:64]}` has no target to answer. {reasons}", retry_after=2)
        context.routed = choice = TargetChoice(public, public.route.targets[chosen])
        context.record.model, context.record.target = name, chosen
        return choice

    def _available(self, public: PublicName, kind: Kind) -> dict[str, Served | None]:
        """The targets that would serve a request now, by id; None: its first request loads it.

        Raises InvalidRequestError for a target of another kind; where rows are computed, others are chosen then, if
        there are any."""
        available: dict[str, Served | None] = {}
        missing: dict[str, PenstockError] = {}
        for target in public.rule.targets:
            try:
                available[target.id] = self._upstream(target, kind) or self._own(target, kind)
            except PenstockError as error:
                missing[target.id] = error
        wrong = [error for error in missing.values() if type(error) is InvalidRequestError]
        if wrong and not (kind.pools and len(wrong) < len(public.rule.targets)):
            raise wrong[0]
        public.unavailable = {id: error.message for id, error in missing.items()}
        return available

    def models(self, name: str) -> list[str]:
        reachable = self._table.names[name].route.reachable()
        return list(dict.fromkeys(target.model for target in reachable.values()))

    def tensors_target(self, name: str, version: str, context: RequestContext) -> str | None:
        return self._tensors.target(self._table.names[name], version, context)

    # What a target is

    def serving(self, context: RequestContext, kind: Kind) -> Served:
        choice = choice_in(context)
        upstream = self._upstream(choice.target, kind)
        if upstream is None:
            return self._resolve(choice.target, kind)
        return RoutedUpstream(self._table, choice, upstream, self.ask_inside)

    def _upstream(self, target: Target, kind: Kind) -> Upstream | None:
        """The model of another server that the target is."""
        model = upstream_of(self._models.model(target.model)) if target.version is None else None
        if model is None or model.gives_way:
            return None
        fits = "embeddings" in model.apis if kind.pools else model.apis != ("embeddings",)
        return model if fits else None

    def _resolve(self, target: Target, kind: Kind) -> NameHolder | PoolingModel:
        """A model of this server. Raises ModelNotFoundError, NotReadyError, and InvalidRequestError for a model of
        another kind."""
        if kind.pools:
            return self._pooling_model(target)
        version = "" if target.version is None else str(target.version)
        if not version and (self._models.model(target.model) or not self._tensors.own.versions(target.model)):
            return self._models.own_language(target.model)
        model = self._tensors.own.model(target.model, version)
        if not isinstance(model, LanguageModel):
            raise InvalidRequestError(f"The model `{target.id}` generates no text.", param="model")
        return NameHolder(model.loaded_model)

    def _pooling_model(self, target: Target) -> PoolingModel:
        if target.version is not None:
            raise InvalidRequestError(f"The model `{target.id}`: embedding models have no versions.", param="model")
        model = self._models.own(target.model, Kind.SCORES).served
        assert isinstance(model, PoolingModel)
        return model

    def _own(self, target: Target, kind: Kind) -> NameHolder | PoolingModel | None:
        """As `_resolve`, for one that is ready; None for a model that a request would load."""
        try:
            served = self._resolve(target, kind)
        except (ModelNotFoundError, NotReadyError):
            if self._would_load(target, kind):
                return None
            raise
        is_ready = served.source.ready if isinstance(served, PoolingModel) else served.model.ready
        if not is_ready:
            raise NotReadyError(f"The model `{target.id}` is not ready.", retry_after=2)
        return served

    def _would_load(self, target: Target, kind: Kind) -> bool:
        """Raises NotReadyError while it is not tried again."""
        demand, name = self._on_demand, target.model
        may_answer = demand is not None and (not kind.pools or (kind.api is not None and demand.is_upstream(name)))
        return demand is not None and may_answer and demand.would_load(name, generates=True)

    # What a name is

    def is_upstream(self, name: str, kind: Kind) -> bool:
        rule = self._table.names[name].rule
        concerned = (Target(name), *rule.targets, *(() if rule.shadow is None else (rule.shadow,)))
        demand = self._on_demand
        stored = demand is not None and any(demand.is_upstream(target.model) for target in concerned)
        return stored or any(self._upstream(target, kind) is not None for target in concerned)

    def first(self, name: str) -> Served | None:
        public = self._table.names[name]
        try:
            available = self._available(public, Kind.TOKENS)
        except InvalidRequestError:
            available = self._available(public, Kind.EMBEDDINGS)
        if not available:
            raise NotReadyError(f"The model `{name[:64]}` has no target to answer.", retry_after=2)
        own = (served for served in available.values() if isinstance(served, NameHolder | PoolingModel))
        return next(own, next(iter(available.values())))

    def listed(self) -> list[tuple[str, Served | None]]:
        listed = []
        for name in sorted(self._table.names):
            if self._models.model(name) is None:
                with suppress(InvalidRequestError, NotReadyError):
                    listed.append((name, self.first(name)))
        return listed

    # What a target does

    def rendered(self, context: RequestContext, values: ChatValues, *, cut: bool) -> None:
        if isinstance(context.routed, TargetChoice):
            context.routed.chat = values, cut

    def accepted(self, request: GenerateRequest) -> LanguageCall:
        choice = choice_in(request.context)
        call = choice.call(self._table)
        rule = choice.public.rule.shadow
        if choice.is_shadow or rule is None:
            return LanguageCall(call)
        if self._upstream(rule, Kind.CHAT) is not None:
            return LanguageCall(call, *begin_text_shadow(choice, request.context, self.ask_inside))
        tokenizer = self._models.language(choice.name, request.context).model.tokenizer
        return LanguageCall(call, *begin_shadow(self._dataplane, self._shadow, choice, request, tokenizer))

    async def _shadow(self, target: Target, context: RequestContext) -> NameHolder:
        """Which is loaded first if need be. Raises PenstockError."""
        if self._on_demand is not None and self._own(target, Kind.TOKENS) is None:
            await self._on_demand.use(target.model, context)
        served = self._resolve(target, Kind.TOKENS)
        assert isinstance(served, NameHolder)
        return served

    def accepted_rows(self, context: RequestContext) -> LanguageCall:
        choice = choice_in(context)
        shadows = choice.public.shadows
        if shadows is not None and shadows.wants(choice.public.key(context)):
            shadows.results[Result.SKIPPED] += 1
        return LanguageCall(choice.call(self._table))


class RoutedUpstream:
    """A model of another server as the target of a request. Implements Upstream."""

    def __init__(
        self, table: TrafficTable, choice: TargetChoice, model: Upstream, ask_inside: AskInside | None
    ) -> None:
        self.name, self.apis, self.created, self.root = model.name, model.apis, model.created, model.root
        self.owner, self.folder, self.refusal, self.gives_way = model.owner, model.folder, model.refusal, False
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
        self, exchange: Exchange, chat: UpstreamChat, *, pulse: float | None
    ) -> AsyncIterator[UpstreamAnswer | str]:
        """As Upstream has it."""
        if self._choice.public.shadows is not None:
            self._choice.keep("chat", msgspec.json.encode({**chat.fields, "model": self._choice.name}))
        with self._counted(exchange.context) as call:
            async with self._model.chat(exchange, chat, pulse=pulse) as answer:
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
    context.entry = context.routed = None
