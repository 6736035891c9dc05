"""The language models of a server by name: which there are, which of them serve, and whose a name is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from penstock.engines.errors import AlreadyExistsError, InvalidRequestError, ModelNotFoundError, NotReadyError
from penstock.gateway.models.language.choice_output import ChoiceDelta
from penstock.gateway.models.language.generate_request import GenerateRequest
from penstock.gateway.models.language.models import LoadedModel, NameHolder, ServedModel
from penstock.gateway.models.language.prompts import ChatValues
from penstock.gateway.models.on_demand.on_demand import OnDemand
from penstock.gateway.requests.changes import Changes
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.requests.loading_board import LoadingBoard
from penstock.gateway.requests.record import Outcome


class AcceptedCall(Protocol):
    """A request, from its acceptance by the target that serves it."""

    watched: bool
    """Whether `took` is to be called."""

    def took(self, deltas: list[ChoiceDelta]) -> None:
        """Its generation has given these out. The list may change afterwards."""

    def responded(self) -> None:
        """There is a first token. Idempotent."""

    def end(self, outcome: Outcome) -> None:
        """Idempotent."""


class NameRouting(Protocol):
    def has(self, name: str) -> bool: ...

    def names(self) -> list[str]:
        """Those that a model of this server serves now."""
        ...

    def names_on_demand(self) -> list[str]:
        """Those whose next request loads a model."""
        ...

    def model_to_load(self, name: str, context: RequestContext) -> str:
        """The target's model. Raises PenstockError."""
        ...

    def find(self, name: str, context: RequestContext | None) -> NameHolder:
        """The target for this request: the same at each call, even if the rule was removed meanwhile. Without a context
        the first target that is there. A name without a rule is a model's own. Raises PenstockError."""
        ...

    def rendered(self, context: RequestContext, values: ChatValues, *, cut: bool) -> None:
        """A chat became a prompt for the request's target."""

    def accepted(self, request: GenerateRequest) -> AcceptedCall:
        """The target that `find` has given gets the request."""
        ...


class LanguageModels:
    """A model has one or more names, each of its adapters one more. Lives on the event loop."""

    def __init__(self, board: LoadingBoard | None = None, on_demand: OnDemand | None = None) -> None:
        """`board` says how far models are that are being loaded. `on_demand` is there where requests load models."""
        self._board = board or LoadingBoard()
        self._on_demand = on_demand
        self._models: dict[str, LoadedModel] = {}
        self._reserved: dict[str, str] = {}
        """Names of models that do not generate, each with the error for a request that asks for it."""
        self.refusals: dict[str, str] = {}
        """As `_reserved`, of models that generate and have no tokens to show. Their names stay free."""
        self.changes = Changes()
        """Told when models or their adapters come and go, and when models sleep and wake."""
        self.routing: NameRouting | None = None
        """For names that several models serve; None while there are none."""

    # Changes

    def add(self, model: LoadedModel) -> None:
        """Its names are taken; it serves after `serve`. It replaces a model with the same name, and may take over the
        names of that one's adapters. Raises AlreadyExistsError for names that are taken otherwise."""
        for name in model.names:
            self._check_free(name, model, self._adapter(name))
        for adapter in model.adapters:
            self._check_free(adapter.name, model, self.holder(adapter.name))
        for name in model.names:
            self._models[name] = model
        model.sleep.on_change = self.changes.tell
        self.changes.tell()

    def _check_free(self, name: str, model: LoadedModel, holder: NameHolder | None) -> None:
        if name in self._reserved:
            raise AlreadyExistsError(f"The name `{name}` is taken by another model.")
        if holder is not None and not set(holder.model.names) & set(model.names):
            other = holder.model.names[0]
            raise AlreadyExistsError(f"The name `{name}` is taken by the model `{other}` or its adapter.")

    def serve(self, model: LoadedModel) -> None:
        """It has loaded, and gets requests from now on."""
        model.loaded = True
        self.changes.tell()

    def remove(self, model: LoadedModel) -> None:
        """Frees its names, but for those that another model has taken over. Requests under way go on."""
        for name in model.names:
            if self._models.get(name) is model:
                del self._models[name]
        self.changes.tell()

    def reserve(self, name: str, refusal: str) -> None:
        """For a model that does not generate: requests that ask for it get `refusal`. Raises AlreadyExistsError."""
        if name in self._reserved or self.holder(name) is not None:
            raise AlreadyExistsError(f"The name `{name}` is taken by another model.")
        self._reserved[name] = refusal

    def release(self, name: str) -> None:
        """Frees a name that `reserve` has taken."""
        self._reserved.pop(name, None)

    async def load_on_demand(self, name: str, context: RequestContext) -> None:
        """To be awaited before a request looks its model up. Returns when the model is loaded, if requests may load it;
        it stays until the request's end. Raises OverloadedError, DeadlineExceededError."""
        if self._on_demand is None:
            return
        if self.routing is not None and self.routing.has(name):
            target = self.routing.model_to_load(name, context)
            await self._on_demand.use_allowed(self._own_name(target), context)
        elif context.principal.may_use(name) and self._on_demand.may_generate(own := self._own_name(name)):
            await self._on_demand.use_allowed(own, context)

    def _own_name(self, name: str) -> str:
        """Of the model that has this name or an adapter of this name."""
        holder = self.holder(name)
        return name if holder is None else holder.model.names[0]

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

    # Which there are

    def known(self) -> list[LoadedModel]:
        """Each model once, those that are still loading included."""
        return list(dict.fromkeys(self._models.values()))

    def loaded(self) -> list[tuple[str, LoadedModel]]:
        """(first name, model) of each that has been loaded, for operators' views."""
        return [(model.names[0], model) for model in self.known() if model.loaded]

    def served(self) -> list[ServedModel]:
        """All names that requests may use, the models' first, then those of their adapters."""
        served = [model.describe(name) for name, model in self._models.items() if model.loaded]
        if self.routing is not None:
            served += [self.find(name).describe(name) for name in self.routing.names()]
        return served + [model.describe(each.name, each) for _, model in self.loaded() for each in model.adapters]

    def names_on_demand(self) -> list[str]:
        """Names of models that are not loaded, and that a request would load."""
        if self._on_demand is None:
            return []
        return [*self._on_demand.language_models(), *(() if self.routing is None else self.routing.names_on_demand())]

    def usable(self, may_use: Callable[[str], bool]) -> list[list[str]]:
        """The names of each model that a request may ask for: of models that are loaded or are being loaded, of those
        that a request would load, and of rules for several models. Those of its adapters stand behind a model's own;
        one that may not be used itself is as many as it has adapters."""
        routed = [] if self.routing is None else self.routing.names()
        found = [[name] for name in (*routed, *self.names_on_demand()) if may_use(name)]
        for model in self.known():
            own = [name for name in model.names if may_use(name)]
            adapters = [adapter.name for adapter in model.adapters if may_use(adapter.name)]
            found += [[*own, *adapters]] if own else [[name] for name in adapters]
        return found

    @property
    def live(self) -> bool:
        """False when a model is down for good: only a new server can help."""
        return not any(model.engine.failed for model in self._models.values())

    @property
    def ready(self) -> bool:
        """True while all models would serve a request now."""
        return all(model.ready for model in self._models.values())

    # Whose a name is

    def find(self, name: str, param: str = "model", context: RequestContext | None = None) -> NameHolder:
        """The model or adapter that gets the request of `context`. Where several serve the name, it is the same one for
        the whole request.

        Raises ModelNotFoundError, InvalidRequestError for a model that does not generate (`param` is the caller's field
        with the name), and NotReadyError while the model loads.
        """
        routed = context is not None and context.routed is not None
        if self.routing is not None and (routed or self.routing.has(name)):
            return self.routing.find(name, context)
        return self.find_own(name, param)

    def find_own(self, name: str, param: str = "model") -> NameHolder:
        """As `find`, for a name that is a model's or an adapter's own, whatever traffic rule it has."""
        holder = self.holder(name)
        if name in self._reserved:
            raise InvalidRequestError(self._reserved[name], param=param)
        if holder is None and name in self._board:
            raise self.still_loading(name)
        if holder is None and name in self.refusals:
            raise InvalidRequestError(self.refusals[name], param=param)
        if holder is None:
            raise ModelNotFoundError(f"The model `{name[:64]}` does not exist.", param=param)
        if not holder.model.loaded:
            raise self.still_loading(holder.model.names[0])
        return holder

    def holder(self, name: str) -> NameHolder | None:
        """The model or adapter with this name, also while it is not loaded yet. None: there is none."""
        model = self._models.get(name)
        return self._adapter(name) if model is None else NameHolder(model)

    def _adapter(self, name: str) -> NameHolder | None:
        for model in self._models.values():
            adapter = model.adapters.get(name)
            if adapter is not None:
                return NameHolder(model, adapter)
        return None

    def knows(self, name: str) -> bool:
        """Whether a model, loaded or not, an adapter or a traffic rule has this name."""
        routed = self.routing is not None and self.routing.has(name)
        return routed or self.holder(name) is not None or name in self.names_on_demand()

    def is_reserved(self, name: str) -> bool:
        """Whether a model that does not generate has this name."""
        return name in self._reserved

    def still_loading(self, name: str) -> NotReadyError:
        """The error for a request that has come too early; it says how far the model is."""
        progress = self._board.text(name)
        return NotReadyError(f"The model is still loading{f' ({progress})' if progress else ''}.", retry_after=2)
