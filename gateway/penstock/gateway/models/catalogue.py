"""The catalogue of names: what each name means, and the one way from a request's model to what serves it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from penstock.engines.errors import AlreadyExistsError, ModelNotFoundError, NotReadyError
from penstock.gateway.configuration.traffic_rules import Target
from penstock.gateway.models.entries import Entry, Kind, Served, Traffic, Upstream, upstream_of
from penstock.gateway.models.language.models import LoadedModel, NameHolder, ServedModel
from penstock.gateway.models.on_demand.on_demand import OnDemand, no_use
from penstock.gateway.models.pooling.model import PoolingModel
from penstock.gateway.models.repository.models import LoadedVersions
from penstock.gateway.requests.changes import Changes
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.requests.loading_board import LoadingBoard


class Catalogue:
    """Name -> entry. A language model has one or more names, each of its adapters one more. Lives on the event loop."""

    def __init__(self, board: LoadingBoard | None = None, on_demand: OnDemand | None = None) -> None:
        """`board` says how far models are that are being loaded. `on_demand` is there where requests load models."""
        self._board = board or LoadingBoard()
        self._on_demand = on_demand
        self._entries: dict[str, Entry] = {}
        self.traffic: Traffic | None = None
        """None while no name has rules."""
        self.changes = Changes()
        """Told when names come and go, and when models sleep and wake."""

    # The way of a request

    async def find(self, name: str, kind: Kind, context: RequestContext) -> Entry:
        """What serves the request: its key may use the name, the name's rules choose a target, and that is loaded if
        need be. The entry stays in the context, where everything behind reads it.

        Raises PermissionDeniedError, ModelNotFoundError, InvalidRequestError for a model of another kind, NotReadyError
        while it loads, OverloadedError, DeadlineExceededError.
        """
        if self._on_demand is None:
            return self.resolved(name, kind, context)
        target = self._target(name, kind, context)
        await self._load(self._on_demand, target.model, kind, context)
        return self._note(name, kind, context)

    def resolved(self, name: str, kind: Kind, context: RequestContext) -> Entry:
        """The entry that `find` has left. If there is none, or its model has gone since, as `find`, but nothing is
        loaded."""
        entry = context.entry
        if not isinstance(entry, Entry) or entry.name != name or not entry.loaded:
            self._target(name, kind, context)
            return self._note(name, kind, context)
        entry.check(kind)
        return entry

    def language(self, name: str, context: RequestContext) -> NameHolder:
        """As `resolved`, for what only language models of this server can do."""
        served = self.resolved(name, Kind.TOKENS, context).served
        assert isinstance(served, NameHolder)
        return served

    def _target(self, name: str, kind: Kind, context: RequestContext) -> Target:
        context.principal.require_model(name)
        rules = self._rules(name, context)
        return Target(name) if rules is None else rules.target(name, kind, context)

    async def _load(self, on_demand: OnDemand, name: str, kind: Kind, context: RequestContext) -> None:
        """The model stays until the request's end. No pooling model of this server is loaded by requests."""
        entry = self._entries.get(name)
        own = name if entry is None else entry.first_name
        served = None if entry is None else entry.served
        if served is not None and not isinstance(served, NameHolder) and self.deployment(name) is None:
            return  # it is of no repository
        if on_demand.is_upstream(own) if kind.pools else on_demand.may_generate(own):
            await on_demand.use(own, context)

    def _note(self, name: str, kind: Kind, context: RequestContext) -> Entry:
        rules = self._rules(name, context)
        entry = self.own(name, kind) if rules is None else Entry(name, rules.serving(context, kind))
        entry.check(kind)
        context.entry = entry
        return entry

    def _rules(self, name: str, context: RequestContext) -> Traffic | None:
        """None: the name is a model's own."""
        is_routed = context.routed is not None and context.routed.name == name
        return self.traffic if is_routed or self._has_rules(name) else None

    def _has_rules(self, name: str) -> bool:
        """Those of a model that takes text as tensors are followed where its tensors go."""
        entry = self._entries.get(name)
        takes_text = entry is not None and entry.upstream is not None and entry.upstream.gives_way
        return self.traffic is not None and not takes_text and self.traffic.has(name)

    # The way of a request that carries tensors: what serves it, a ModelStore gives afterwards

    async def admit(self, name: str, version: str, context: RequestContext, *, loads: bool = True) -> None:
        """The steps of `find` for the model's tensors: the key may use the name, the name's rules say what has to be
        there, and with `loads` that is loaded if need be. Nothing happens for a name that there is not: looking it up
        says what is wrong.

        Which target gets the request is chosen when it has been decoded: those of a sequence stay together, and only
        the request tells its sequence. Raises PermissionDeniedError, NotReadyError, OverloadedError,
        DeadlineExceededError.
        """
        context.principal.require_model(name)
        if loads and self._on_demand is not None:
            rules = self._tensor_rules(name)
            target = name if rules is None else rules.tensors_target(name, version, context)
            if target is not None:
                await self._on_demand.use(target, context)

    async def offers(self, name: str, context: RequestContext) -> bool:
        """Whether `admit` may load what the name leads to, or keep it from being unloaded, so that it comes when the
        request is there. Raises PermissionDeniedError, and NotReadyError while what could not be loaded is not tried
        again."""
        context.principal.require_model(name)
        return self._on_demand is not None and await self._offers(self._on_demand, name)

    async def _offers(self, on_demand: OnDemand, name: str) -> bool:
        models = self._tensor_models(name)
        failure: NotReadyError | None = None
        for model in sorted(models, key=lambda model: self.deployment(model) is None):
            try:
                if await on_demand.offers(model):
                    return True
            except NotReadyError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return False

    def would_load(self, name: str) -> bool:
        """Whether a request for the tensors of this name, which does not serve, would load a model, as far as it is
        known: what readiness says of it."""
        with suppress(NotReadyError):
            return self._on_demand is not None and any(map(self._on_demand.would_load, self._tensor_models(name)))
        return False

    async def use_for_model(self, name: str, deadline: float | None) -> Callable[[], None]:
        """As `admit`, for a model of this server that asks another one; to be called at the end. Raises NotReadyError,
        OverloadedError, DeadlineExceededError."""
        if self._on_demand is None:
            return no_use
        rules = self._tensor_rules(name)
        if rules is None:
            return await self._on_demand.use_for_model(name, deadline)
        models = rules.models(name)
        if not any(map(self.deployment, models)):
            for model in models:  # one of them tells what all are like; the request uses the one that it gets
                (await self._on_demand.use_for_model(model, deadline))()
                if self.deployment(model) is not None:
                    break
        return no_use

    @property
    def loads(self) -> bool:
        """Whether requests load models."""
        return self._on_demand is not None

    def _tensor_rules(self, name: str) -> Traffic | None:
        return self.traffic if self.traffic is not None and self.traffic.has(name) else None

    def _tensor_models(self, name: str) -> list[str]:
        """That the name may lead to: the model of the name itself comes last."""
        rules = self._tensor_rules(name)
        return [name] if rules is None else [*rules.models(name), name]

    def is_upstream(self, name: str, kind: Kind) -> bool:
        """Whether another server may get such requests, so that `find` comes before the body is read."""
        if self.traffic is not None and self._has_rules(name):
            return self.traffic.is_upstream(name, kind)
        is_stored = self._on_demand is not None and self._on_demand.is_upstream(name)
        return is_stored or upstream_of(self.model(name)) is not None

    # What a name means by itself

    def model(self, name: str) -> Served | None:
        """That answers texts or computes rows, also while it is not loaded yet, whatever rules the name has."""
        entry = self._entries.get(name)
        return None if entry is None else entry.served

    def holder(self, name: str) -> NameHolder | None:
        """The language model or adapter with this name."""
        model = self.model(name)
        return model if isinstance(model, NameHolder) else None

    def deployment(self, name: str) -> LoadedVersions | None:
        """The KServe model with this name, if it serves."""
        entry = self._entries.get(name)
        return None if entry is None else entry.tensors

    def deployments(self) -> list[tuple[str, LoadedVersions]]:
        """All KServe models that serve, by name."""
        return [(name, entry.tensors) for name, entry in sorted(self._entries.items()) if entry.tensors is not None]

    def own(self, name: str, kind: Kind | None, param: str = "model") -> Entry:
        """`kind` None: any. `param`: the caller's field with the name. Raises ModelNotFoundError, NotReadyError while
        the model loads, and InvalidRequestError for one of another kind."""
        entry = self._entries.get(name)
        if entry is None or entry.served is None:
            if name in self._board:
                raise self.still_loading(name)
            raise ModelNotFoundError(f"The model `{name[:64]}` does not exist.", param=param)
        if kind is not None:
            entry.check(kind, param)
        if not entry.loaded:
            raise self.still_loading(entry.first_name)
        return entry

    def own_language(self, name: str, param: str = "model") -> NameHolder:
        """As `own`, for what operators do to language models."""
        served = self.own(name, Kind.TOKENS, param).served
        assert isinstance(served, NameHolder)
        return served

    def first(self, name: str) -> Served | None:
        """What describes a name to those who look at it; None: a model that a request would load. Raises as `own`."""
        if self.traffic is not None and self._has_rules(name):
            return self.traffic.first(name)
        return None if name in self._on_demand_names() else self.own(name, None).served

    def __contains__(self, name: str) -> bool:
        """Whether a model or an adapter, loaded or not, or a traffic rule has this name."""
        routed = self.traffic is not None and self.traffic.has(name)
        return routed or self.model(name) is not None or name in self._on_demand_names()

    def still_loading(self, name: str) -> NotReadyError:
        """The error for a request that has come too early; it says how far the model is."""
        progress = self._board.text(name)
        return NotReadyError(f"The model is still loading{f' ({progress})' if progress else ''}.", retry_after=2)

    # Changes

    def add(self, model: LoadedModel | PoolingModel | Upstream) -> None:
        """Its names are taken, those of its adapters among them. It replaces a language model or one of another server
        with the same name, and may take over the names of that one's adapters. Raises AlreadyExistsError for names that
        are taken otherwise."""
        entries = _entries_of(model)
        for entry in entries:
            self._check_free(entry)
        for entry in entries:
            self._put(entry.name, entry.served)
        if isinstance(model, LoadedModel):
            model.sleep.on_change = self.changes.tell
            model.adapters.on_change = self._adapters_changed
            self._follow_adapters()
        self.changes.tell()

    def _check_free(self, new: Entry) -> None:
        old = self._entries.get(new.name)
        if old is None or old.served is None or old.served == new.served:
            return
        if old.upstream is not None and (new.upstream is not None or old.upstream.gives_way):
            return
        if not (isinstance(old.served, NameHolder) and isinstance(new.served, NameHolder)):
            raise AlreadyExistsError(f"The name `{new.name}` is taken by another model.")
        both_own = old.served.adapter is None and new.served.adapter is None
        if not both_own and not set(old.served.model.names) & set(new.served.model.names):
            other = old.first_name
            raise AlreadyExistsError(f"The name `{new.name}` is taken by the model `{other}` or its adapter.")

    def serve(self, model: LoadedModel | PoolingModel) -> None:
        """It has loaded, and gets requests from now on."""
        model.loaded = True
        self.changes.tell()

    def remove(self, model: LoadedModel | Upstream) -> None:
        """Frees its names, but for those that another model has taken over. Requests under way go on."""
        if isinstance(model, LoadedModel):
            model.loaded = False
        for name in [name for name, entry in self._entries.items() if _belongs(entry, model)]:
            self._put(name, None)
        self._follow_adapters()
        self.changes.tell()

    def _adapters_changed(self) -> None:
        self._follow_adapters()
        self.changes.tell()

    def _follow_adapters(self) -> None:
        """Models have adapters, as far as their names are free, and no others have names."""
        models = self.known()
        for name, entry in list(self._entries.items()):
            if isinstance(entry.served, NameHolder) and entry.served.adapter is not None:
                model, adapter = entry.served
                if model not in models or model.adapters.get(name) is not adapter:
                    self._put(name, None)
        for model in models:
            for adapter in model.adapters:
                if self.model(adapter.name) is None:
                    self._put(adapter.name, NameHolder(model, adapter))

    def publish(self, name: str, tensors: LoadedVersions | None) -> None:
        """These versions serve the KServe model of this name from now on; None: none do."""
        self._put(name, self.model(name), tensors)
        self.changes.tell()

    def _put(self, name: str, served: Served | None, *tensors: LoadedVersions | None) -> None:
        """`tensors`: others than the name has."""
        [deployment] = tensors or (self.deployment(name),)
        if served is None and deployment is None:
            self._entries.pop(name, None)
        else:
            self._entries[name] = Entry(name, served, deployment)

    # Which there are

    def known(self) -> list[LoadedModel]:
        """Each language model once, those that are still loading included."""
        holders = [entry.served for entry in self._entries.values() if isinstance(entry.served, NameHolder)]
        return list(dict.fromkeys(holder.model for holder in holders if holder.adapter is None))

    def loaded(self) -> list[tuple[str, LoadedModel]]:
        """(first name, model) of each language model that has been loaded, for operators' views."""
        return [(model.names[0], model) for model in self.known() if model.loaded]

    def pooling_models(self) -> list[PoolingModel]:
        """Each once, those that are still loading included."""
        served = [entry.served for entry in self._entries.values()]
        return list(dict.fromkeys(model for model in served if isinstance(model, PoolingModel)))

    def listed(self) -> list[tuple[str, Served | None]]:
        """All names that requests may use, each with what describes it: language models before their adapters, pooling
        models, what a request would load (None), models of other servers."""
        listed: list[tuple[str, Served | None]] = [
            (entry.name, entry.served) for entry in self._entries.values() if entry.loaded
        ]
        listed += [] if self.traffic is None else self.traffic.listed()
        listed += [(name, None) for name in self._on_demand_names()]
        order = {model: number for number, model in enumerate(self.known())}
        return sorted(listed, key=lambda name_and_model: _place(name_and_model[1], order))

    def served(self) -> list[ServedModel]:
        """The language models and adapters among them."""
        return [served.describe(name) for name, served in self.listed() if isinstance(served, NameHolder)]

    def is_on_demand(self, name: str) -> bool:
        """Whether no model is loaded of this name, and a request would load one."""
        if self.traffic is not None and self._has_rules(name):
            return (name, None) in self.traffic.listed()
        return name in self._on_demand_names()

    def _on_demand_names(self) -> list[str]:
        return [] if self._on_demand is None else self._on_demand.generating_models()

    def usable(self, kind: Kind, may_use: Callable[[str], bool], capabilities: Sequence[str] = ()) -> list[list[str]]:
        """The names of each model that such a request may ask for, one that is still loading included; those of its
        adapters stand behind a model's own; one that may not be used itself is as many as it has adapters.
        `capabilities`: of pooling models those count that have the first of these that any has."""
        listed = self.listed()
        if kind.pools:
            names = self._pooling_names(listed, capabilities)
        else:
            names = [[name] for name, served in listed if self._is_usable(name, served, kind)]
            for model in self.known():
                own = [name for name in model.names if may_use(name)]
                adapters = [adapter.name for adapter in model.adapters if may_use(adapter.name)]
                names += [[*own, *adapters]] if own else [[name] for name in adapters]
        names += [[name] for name, served in listed if _answers(served, kind)]
        return [usable for usable in ([*filter(may_use, group)] for group in names) if usable]

    def _is_usable(self, name: str, served: Served | None, kind: Kind) -> bool:
        """Whether a name that is no loaded model's own is one of a language model, or may be."""
        if served is None:
            return kind.api is not None or self._on_demand is None or not self._on_demand.is_upstream(name)
        return isinstance(served, NameHolder) and self.model(name) is None

    def _pooling_names(
        self, listed: Iterable[tuple[str, Served | None]], capabilities: Sequence[str]
    ) -> list[list[str]]:
        """Models that are still loading count where no other is there."""
        models = self.pooling_models()
        known = [
            ([*model.names], model) for model in ([candidate for candidate in models if candidate.loaded] or models)
        ]
        rules = [(name, model) for name, model in listed if self.model(name) is None]
        known += [([name], model) for name, model in rules if isinstance(model, PoolingModel)]
        for capability in capabilities:
            if names := [names for names, model in known if capability in model.capabilities]:
                return names
        return [] if capabilities else [names for names, _ in known]

    @property
    def live(self) -> bool:
        """False when a language model is down for good: only a new server can help."""
        return not any(model.engine.failed for model in self.known())

    @property
    def ready(self) -> bool:
        """True while all language models would serve a request now."""
        return all(model.ready for model in self.known())

    # How long models stay

    def keep(self, model: LoadedModel, seconds: float | None, context: RequestContext) -> bool:
        """How long a model that sleeps or is loaded on demand stays without a request from now on; None: for ever. With
        0 it goes when the requests that it has have ended. False: it stays, whatever requests say."""
        if model.sleep.falls_asleep:
            model.sleep.keep(seconds)
            return True
        return self._on_demand is not None and self._on_demand.keep(model.names[0], seconds, context.principal)

    def seconds_left(self, model: LoadedModel) -> float | None:
        """Until a model falls asleep or is unloaded if no request comes; None: it stays."""
        if model.sleep.falls_asleep or self._on_demand is None:
            return model.sleep.seconds_left
        return self._on_demand.seconds_left(model.names[0])


def _entries_of(model: LoadedModel | PoolingModel | Upstream) -> list[Entry]:
    if isinstance(model, LoadedModel):
        own = [Entry(name, NameHolder(model)) for name in model.names]
        return own + [Entry(adapter.name, NameHolder(model, adapter)) for adapter in model.adapters]
    names = model.names if isinstance(model, PoolingModel) else (model.name,)
    return [Entry(name, model) for name in names]


def _belongs(entry: Entry, model: LoadedModel | Upstream) -> bool:
    served = entry.served
    return (served.model if isinstance(served, NameHolder) else served) is model


def _answers(served: Served | None, kind: Kind) -> bool:
    upstream = upstream_of(served)
    return upstream is not None and kind.api in upstream.apis


def _place(served: Served | None, order: Mapping[LoadedModel, int]) -> tuple[int, int]:
    if isinstance(served, NameHolder):
        return (0, 0) if served.adapter is None else (1, order.get(served.model, len(order)))
    return (2 if isinstance(served, PoolingModel) else 3 if served is None else 4), 0
