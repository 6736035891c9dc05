"""A request on its way to a target: chosen once, accepted, and ended once."""

from __future__ import annotations

from collections.abc import Collection

from penstock.engines.errors import NotReadyError
from penstock.gateway.configuration.traffic_rules import Target
from penstock.gateway.front.context import RequestContext
from penstock.gateway.front.record import Outcome
from penstock.gateway.llm.prompts import ChatValues
from penstock.gateway.traffic.table import PublicName, TrafficTable


class Choice:
    """What a request's public name has led to. Stays with the request: its prompt is made for this target."""

    def __init__(self, public: PublicName, target: Target) -> None:
        self.public = public
        self.target = target
        self.chat: tuple[ChatValues, bool] | None = None
        """What the prompt was rendered from, and whether it may be cut."""


def choice_of(name: str, context: RequestContext) -> Choice | None:
    """The one that was made for this request, if there is one already."""
    made = context.routed
    return made if isinstance(made, Choice) and made.public.rule.name == name else None


def choose_target(table: TrafficTable, public: PublicName, available: Collection[str], context: RequestContext) -> str:
    """By id, and noted with the request. Raises NotReadyError."""
    chosen = public.route.choose(public.key(context), available, table.clock())
    if chosen is None:
        reasons = " ".join(public.unavailable.values()) or "None with a share of the requests is available."
        name = public.rule.name[:64]
        raise NotReadyError(f"The model `{name}` has no target to answer. {reasons}", retry_after=2)
    context.routed = Choice(public, public.route.targets[chosen])
    context.record.model, context.record.target = public.rule.name, chosen
    return chosen


class RoutedCall:
    """What a target has accepted; it ends once, however often it is told to."""

    def __init__(self, table: TrafficTable, name: PublicName, target: str) -> None:
        self._table = table
        self._route = name.route
        self._target = target
        self._began = table.clock()
        self._seconds: float | None = None
        self._ended = False
        name.route.accepted(target)

    def responded(self) -> None:
        """There is a first response. Idempotent."""
        if self._seconds is None:
            self._seconds = self._table.clock() - self._began

    def end(self, outcome: Outcome) -> None:
        """Idempotent."""
        if not self._ended:
            self._ended = True
            self._route.ended(self._target, outcome, self._seconds, self._table.clock())
