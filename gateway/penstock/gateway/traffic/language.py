"""Public names for the APIs of language models: which target a request goes to."""

from __future__ import annotations

from penstock.engines.errors import InvalidRequestError, NotReadyError, PenstockError
from penstock.gateway.configuration.traffic_rules import Target
from penstock.gateway.front.context import RequestContext
from penstock.gateway.kserve.store import ModelStore
from penstock.gateway.llm.dataplane import DataPlane
from penstock.gateway.llm.generate_request import GenerateRequest
from penstock.gateway.llm.kserve.language_model import LanguageModel
from penstock.gateway.llm.models import NameHolder
from penstock.gateway.llm.prompts import ChatValues
from penstock.gateway.traffic.language_call import LanguageCall, begin_shadow
from penstock.gateway.traffic.routed_call import Choice, RoutedCall, choice_of, choose_target
from penstock.gateway.traffic.table import PublicName, TrafficTable


class LanguageRouting:
    """Implements NameRouting."""

    def __init__(self, table: TrafficTable, dataplane: DataPlane, models: ModelStore) -> None:
        self._table = table
        self._dataplane = dataplane
        self._models = models

    def has(self, name: str) -> bool:
        return name in self._table.names

    def names(self) -> list[str]:
        """Of those that language models serve now, without those that are a model's own name as well."""
        return [
            name
            for name, public in sorted(self._table.names.items())
            if self._dataplane.models.holder(name) is None and self._is_served(public)
        ]

    def _is_served(self, public: PublicName) -> bool:
        try:
            return bool(self._available(public))
        except InvalidRequestError:
            return False

    def find(self, name: str, context: RequestContext | None) -> NameHolder:
        made = None if context is None else choice_of(name, context)
        if made is not None:
            return self.resolve(made.target)
        public = self._table.names.get(name)
        if public is None:
            return self._dataplane.models.find_own(name)
        if context is None:
            found = self._available(public)
            if not found:
                raise NotReadyError(f"The model `{name[:64]}` has no target to answer.", retry_after=2)
            return next(iter(found.values()))
        context.principal.require_model(name)
        found = self._available(public)
        return found[choose_target(self._table, public, found, context)]

    def _available(self, public: PublicName) -> dict[str, NameHolder]:
        """By id. Raises InvalidRequestError where a target is no language model: nothing can be said of it here."""
        found: dict[str, NameHolder] = {}
        missing: dict[str, str] = {}
        for target in public.rule.targets:
            try:
                holder = self.resolve(target)
                if not holder.model.ready:
                    raise NotReadyError(f"The model `{target.id}` is not ready.", retry_after=2)
                found[target.id] = holder
            except PenstockError as error:
                if type(error) is InvalidRequestError:
                    raise
                missing[target.id] = error.message
        public.unavailable = missing
        return found

    def resolve(self, target: Target) -> NameHolder:
        """Raises ModelNotFoundError and NotReadyError, and InvalidRequestError for a model of another kind."""
        version = "" if target.version is None else str(target.version)
        if not version and (self._dataplane.models.holder(target.model) or not self._models.versions(target.model)):
            return self._dataplane.models.find_own(target.model)
        model = self._models.model(target.model, version)
        if not isinstance(model, LanguageModel):
            raise InvalidRequestError(f"The model `{target.id}` generates no text.", param="model")
        return NameHolder(model.loaded_model)

    def rendered(self, context: RequestContext, values: ChatValues, *, cut: bool) -> None:
        if isinstance(context.routed, Choice):
            context.routed.chat = values, cut

    def accepted(self, request: GenerateRequest) -> LanguageCall:
        choice = request.context.routed
        if not isinstance(choice, Choice):
            raise TypeError("the request has not been given to a target")
        public = choice.public
        tokenizer = self.resolve(choice.target).model.tokenizer
        call = RoutedCall(self._table, public, choice.target.id)
        shadow = begin_shadow(self._dataplane, self.resolve, public, request, choice.chat)
        return LanguageCall(call, shadow, tokenizer)
