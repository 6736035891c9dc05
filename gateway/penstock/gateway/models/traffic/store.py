"""The ModelStore that fronts see: the server's own, and the public names that several of its models serve."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial

from penstock.classic.base import InferModel
from penstock.classic.messages import InferRequest
from penstock.engines.errors import ModelNotFoundError, NotReadyError, PenstockError, UnsupportedError
from penstock.gateway.apis.kserve.store import IndexEntry, ModelStore
from penstock.gateway.configuration.traffic_rules import Target
from penstock.gateway.models.on_demand.on_demand import OnDemand, no_use
from penstock.gateway.models.traffic.table import PublicName, TrafficTable
from penstock.gateway.models.traffic.target_model import OnDemandTarget, PublicModel, TargetModel
from penstock.gateway.requests.context import Principal, RequestContext

_LEAST_IDLE = 60.0
"""Seconds that a sequence keeps its target without a request: longer than its model may know it."""


class TrafficStore:
    """Implements ModelStore. Targets are names and versions of `own`, never public names: no circles."""

    def __init__(
        self,
        own: ModelStore,
        table: TrafficTable,
        in_other_apis: Callable[[str], bool],
        on_demand: OnDemand | None = None,
    ) -> None:
        """`in_other_apis`: whether the other APIs have a model of this name that KServe never has."""
        self.own = own
        self._in_other_apis = in_other_apis
        self._table = table
        self._on_demand = on_demand

    def model(self, name: str, version: str = "", request: InferRequest | None = None) -> InferModel:
        public = self._table.names.get(name)
        if public is None or (version and self.own.versions(name)):
            return self.own.model(name, version, request)
        targets = self.available(public)
        matches = {id: target for id, target in targets.items() if version in ("", str(target.version))}
        if not matches:
            public.route.advance(self._possible(public, targets), self._table.clock())
            raise self._nothing(public, version)
        if request is None:
            return PublicModel(list(matches.values()))
        return self._chosen(public, targets, request, matches if version else None)

    def available(self, public: PublicName) -> dict[str, TargetModel]:
        """The targets that are loaded and would serve a request now, by id, in the rule's order.

        Raises UnsupportedError where a target is a model that KServe never has: an adapter, for example."""
        target_models: dict[str, TargetModel] = public.target_models
        targets: dict[str, TargetModel] = {}
        missing: dict[str, str] = {}
        for id, target in public.route.reachable().items():
            try:
                model = self.find(target)
            except PenstockError as error:
                if isinstance(error, ModelNotFoundError) and self._in_other_apis(target.model):
                    raise UnsupportedError(
                        f"model '{public.rule.name}' is served by '{id}', which is not a model of this API"
                    ) from None
                target_models.pop(id, None)
                missing[id] = error.message
                continue
            known = target_models.get(id)
            if known is None or known.model is not model:
                known = target_models[id] = TargetModel(self._table, public, id, model, partial(self._shadow, public))
            reason = known.unfit_beside(next(iter(targets.values()), known))
            if reason is not None:
                missing[id] = reason
            else:
                targets[id] = known
        public.unavailable = missing
        return targets

    def _possible(self, public: PublicName, ids: Collection[str]) -> list[str]:
        """Those of `available`, and those that a request would load, by id."""
        if self._on_demand is None:
            return list(ids)
        possible = []
        for id in public.route.reachable():
            try:
                if id in ids or self._would_load(self._on_demand, public, id):
                    possible.append(id)
            except NotReadyError as error:
                public.unavailable[id] = error.message
        for id in possible:
            public.unavailable.pop(id, None)
        return possible

    def _would_load(self, on_demand: OnDemand, public: PublicName, id: str) -> bool:
        name = public.route.targets[id].model
        return not self.own.versions(name) and on_demand.would_load(name)

    def find(self, target: Target) -> InferModel:
        """Raises PenstockError where it would not serve a request now."""
        model = self.own.model(target.model, "" if target.version is None else str(target.version))
        if not model.ready:
            raise NotReadyError(f"model '{target.id}' is not at ready state")
        return model

    async def _shadow(self, public: PublicName, context: RequestContext) -> InferModel:
        shadow = public.rule.shadow
        if shadow is None:
            raise NotReadyError("the shadow has gone")
        if self._on_demand is not None:
            await self._on_demand.use(shadow.model, context)
        return self.find(shadow)

    def _chosen(
        self,
        public: PublicName,
        targets: dict[str, TargetModel],
        request: InferRequest,
        only: Collection[str] | None,
    ) -> InferModel:
        """One of `targets`, or of those that a request would load. Raises NotReadyError."""
        context = request.caller or request.origin
        if not isinstance(context, RequestContext):
            context = RequestContext(principal=Principal(tenant=request.tenant))
        possible = self._possible(public, targets)
        route, now = public.route, self._table.clock()
        if not request.correlation_id:
            target = route.choose(public.key(context), possible, now, only)
        else:
            idle = max((_idle_seconds(model) for model in targets.values()), default=_LEAST_IDLE)
            target = route.choose_for_sequence(
                (request.tenant, request.correlation_id),
                public.key(context, request.correlation_id),
                possible,
                now,
                only,
                start=request.sequence_start,
                end=request.sequence_end,
                idle_seconds=idle,
            )
        if target is None:
            raise self._nothing(public)
        if target not in possible:  # a sequence began there
            raise NotReadyError(f"the sequence runs on '{target}', which is not available")
        if self._on_demand is None or (
            target in targets and request.caller is not None and context.uses(targets[target].model.name)
        ):
            return targets[target]
        return OnDemandTarget(
            targets.get(target) or next(iter(targets.values())), partial(self._loaded, public, target)
        )

    async def _loaded(
        self, public: PublicName, id: str, request: InferRequest
    ) -> tuple[TargetModel, Callable[[], None]]:
        """The target, once it is loaded, and what ends its use by a request that another model makes. Raises
        PenstockError."""
        assert self._on_demand is not None
        name, context = public.route.targets[id].model, request.caller
        end: Callable[[], None] = no_use
        if isinstance(context, RequestContext):
            for other in {target.model for target in public.route.targets.values()} - {name}:
                context.end_use(other)  # it was only looked at, and must not keep the target out
            await self._on_demand.use(name, context)
        else:
            end = await self._on_demand.use_for_model(name, request.deadline)
        targets = self.available(public)
        if id not in targets:
            end()
            raise NotReadyError(f"model '{id}' is not at ready state: {public.unavailable.get(id, 'it has gone')}")
        return targets[id], end

    def target(self, public: PublicName, version: str, context: RequestContext) -> str | None:
        """As Traffic.tensors_target."""
        name = public.rule.name
        if version and (self.own.versions(name) or self._is_stored(name)):
            return name
        targets = self.available(public)
        only = (
            None
            if not version
            else [id for id, target in public.route.targets.items() if str(target.version) == version]
        )
        chosen = public.route.choose(public.key(context), self._possible(public, targets), self._table.clock(), only)
        if chosen is not None and chosen not in targets and targets:
            chosen = next(iter(targets))  # it says what the target takes; a sequence may go elsewhere
        return None if chosen is None else public.route.targets[chosen].model

    def _is_stored(self, name: str) -> bool:
        return self._on_demand is not None and self._on_demand.would_load(name)

    def _nothing(self, public: PublicName, version: str = "") -> PenstockError:
        name = public.rule.name
        if version:
            return ModelNotFoundError(f"Request for unknown model: '{name}' version {version} is not found")
        reasons = "; ".join(public.unavailable.values()) or "none of those with a share is available"
        return NotReadyError(f"Request for unknown model: '{name}' is not at ready state: {reasons}")

    # What there is

    def versions(self, name: str) -> list[int]:
        own = self.own.versions(name)
        public = self._table.names.get(name)
        if own or public is None:
            return own
        return sorted({target.version for target in self.available(public).values()})

    def models(self) -> Iterable[InferModel]:
        """The targets among them; public names have no models of their own."""
        return self.own.models()

    def index(self, *, ready: bool) -> list[IndexEntry]:
        """A public name has one line, without a version, that says what serves it."""
        lines = self.own.index(ready=ready)
        known = {line.name for line in lines}
        for name, public in sorted(self._table.names.items()):
            line = None if name in known else self._line(public)
            if line is not None and (line.state == "READY" or not ready):
                lines.append(line)
        return lines

    def _line(self, public: PublicName) -> IndexEntry | None:
        try:
            targets = self.available(public)
        except UnsupportedError:
            return None
        if not targets:
            return IndexEntry(public.rule.name, "", "UNAVAILABLE", "; ".join(public.unavailable.values()))
        shares = ", ".join(f"{target} {share:.4g}" for target, share in public.route.shares().items())
        return IndexEntry(public.rule.name, "", "READY", f"served by {shares}")

    # What changes it

    async def load(self, name: str, *, config: str | None = None, files: Mapping[str, bytes] | None = None) -> None:
        await self.own.load(name, config=config, files=files)

    async def unload(self, name: str, *, unload_dependents: bool = False) -> None:
        await self.own.unload(name, unload_dependents=unload_dependents)

    @property
    def ready(self) -> bool:
        return self.own.ready


def _idle_seconds(model: TargetModel) -> float:
    limit_us = int(model.config.sequence_batching.max_sequence_idle_microseconds)
    return max(_LEAST_IDLE, 2 * limit_us / 1e6)
