"""Public names for embedding and ranking models: which target a request goes to."""

from __future__ import annotations

from penstock.engines.errors import InvalidRequestError, NotReadyError, PenstockError
from penstock.gateway.configuration.traffic_rules import Target
from penstock.gateway.front.context import RequestContext
from penstock.gateway.pooling.models import PoolingModel
from penstock.gateway.pooling.plane import PoolingPlane
from penstock.gateway.traffic.routed_call import Choice, RoutedCall, choice_of, choose_target
from penstock.gateway.traffic.shadows import Result
from penstock.gateway.traffic.table import PublicName, TrafficTable


class EmbeddingRouting:
    """Implements PoolingRouting."""

    def __init__(self, table: TrafficTable, pooling: PoolingPlane) -> None:
        self._table = table
        self._pooling = pooling

    def has(self, name: str) -> bool:
        """Whether one of the name's targets gives vectors or scores."""
        public = self._table.names.get(name)
        return public is not None and any(self._pooling.has(target.model) for target in public.rule.targets)

    def names(self) -> list[tuple[str, PoolingModel]]:
        """Of those that are served now, without those that are a model's own name as well."""
        found = []
        for name, public in sorted(self._table.names.items()):
            if self.has(name) and not self._pooling.has(name):
                models = self._available(public)
                found += [(name, model) for model in list(models.values())[:1]]
        return found

    def find(self, name: str, context: RequestContext) -> PoolingModel:
        public = self._table.names[name]
        made = choice_of(name, context)
        if made is not None:
            return self._resolve(made.target)
        found = self._available(public)
        return found[choose_target(self._table, public, found, context)]

    def _available(self, public: PublicName) -> dict[str, PoolingModel]:
        found: dict[str, PoolingModel] = {}
        missing: dict[str, str] = {}
        for target in public.rule.targets:
            try:
                model = self._resolve(target)
                if not model.source.ready:
                    raise NotReadyError(f"The model `{target.id}` is not ready.", retry_after=2)
                found[target.id] = model
            except PenstockError as error:
                missing[target.id] = error.message
        public.unavailable = missing
        return found

    def _resolve(self, target: Target) -> PoolingModel:
        if target.version is not None:
            raise InvalidRequestError(f"The model `{target.id}`: embedding models have no versions.", param="model")
        return self._pooling.find_own(target.model)

    def accepted(self, context: RequestContext) -> RoutedCall:
        choice = context.routed
        if not isinstance(choice, Choice):
            raise TypeError("the request has not been given to a target")
        shadows = choice.public.shadows
        if shadows is not None and shadows.wants(choice.public.key(context)):
            shadows.results[Result.SKIPPED] += 1
        return RoutedCall(self._table, choice.public, choice.target.id)
