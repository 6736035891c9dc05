"""All public names of a server that have rules, what has happened to them, and who is told when they change."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.gateway.configuration.traffic_rules import Target, TrafficRule
from penstock.gateway.models.language.prompts import ChatValues
from penstock.gateway.models.traffic.route import TrafficRoute
from penstock.gateway.models.traffic.shadows import Shadows
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.requests.record import Outcome

logger = logging.getLogger("penstock.traffic")

MAX_RULES = 256
_KEPT_EVENTS = 256


@dataclass(frozen=True, slots=True)
class Event:
    time: float
    """Unix seconds."""
    name: str
    """The public one."""
    text: str


class PublicName:
    """A rule with what it needs to run."""

    def __init__(self, rule: TrafficRule, tell: Callable[[int, str], None]) -> None:
        self.rule = rule
        self.route = TrafficRoute(rule, tell)
        self.shadows = None if rule.shadow is None else Shadows(rule.shadow)
        self.unavailable: dict[str, str] = {}
        """Why targets were not available when last looked at, by id."""
        self.target_models: dict[str, Any] = {}
        """What the KServe side has made of them, by id, while they stay the same models."""

    def take_over(self, old: PublicName) -> None:
        """This rule replaces that one. Its shadows end."""
        self.route.take_over(old.route)
        if old.shadows is not None:
            old.shadows.stop()
            if self.shadows is not None and self.shadows.rule.id == old.shadows.rule.id:
                self.shadows.results = old.shadows.results

    def key(self, context: RequestContext, sequence: int | str | None = None) -> bytes:
        """What decides where the request goes, or the sequence that it belongs to."""
        if self.rule.by_tenant and context.tenant:
            return b"tenant " + context.tenant.encode("utf-8", "surrogatepass")
        header = self.rule.sticky_header
        value = None if header is None else context.headers.get(header)
        if value is not None:
            return b"header " + value
        own = f"request {context.id}" if sequence is None else f"sequence {context.tenant} {sequence!r}"
        return own.encode("utf-8", "surrogatepass")


class TrafficTable:
    """Lives on the event loop. `clock` never goes back; `wall` gives Unix seconds."""

    def __init__(
        self,
        rules: Iterable[TrafficRule] = (),
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.clock = clock
        self.names: dict[str, PublicName] = {}
        self.events: deque[Event] = deque(maxlen=_KEPT_EVENTS)
        self._wall = wall
        self._stopped = False
        self._on_change: list[Callable[[], None]] = []
        for rule in rules:
            self.put(rule)

    def on_change(self, tell: Callable[[], None]) -> None:
        """`tell` is called now, and whenever names come or go."""
        self._on_change.append(tell)
        tell()

    def put(self, rule: TrafficRule) -> None:
        """From now on this holds; a shift begins from its start. Requests under way end where they are, sequences stay
        on their targets. Raises ValueError for one rule too many."""
        old = self.names.get(rule.name)
        if old is None and len(self.names) >= MAX_RULES:
            raise ValueError(f"there are {MAX_RULES} traffic rules already")
        new = PublicName(rule, partial(self._tell, rule.name))
        if old is not None:
            new.take_over(old)
        if self._stopped and new.shadows is not None:
            new.shadows.stop()
        self.names[rule.name] = new
        targets = ", ".join(f"{target} {share:.4g}" for target, share in new.route.shares().items())
        self._tell(rule.name, logging.INFO, f"rule set: {targets}")
        self._changed()

    def remove(self, name: str) -> bool:
        """Whether there was such a rule. A model of this name is served by itself again."""
        public = self.names.pop(name, None)
        if public is None:
            return False
        public.route.stop_shift()
        if public.shadows is not None:
            public.shadows.stop()
        self._tell(name, logging.INFO, "rule removed")
        self._changed()
        return True

    def stop_shadows(self) -> None:
        self._stopped = True
        for name in self.names.values():
            if name.shadows is not None:
                name.shadows.stop()

    def _changed(self) -> None:
        for tell in self._on_change:
            tell()

    def _tell(self, name: str, level: int, text: str) -> None:
        self.events.append(Event(self._wall(), name, text))
        logger.log(level, "traffic '%s': %s", name, text)


class TargetChoice:
    """What a request's public name has led to. Stays with the request: its prompt is made for this target."""

    def __init__(self, public: PublicName, target: Target, *, is_shadow: bool = False) -> None:
        """`is_shadow`: the request is the server's own, and the target is the shadow."""
        self.public = public
        self.target = target
        self.is_shadow = is_shadow
        self.chat: tuple[ChatValues, bool] | None = None
        """What the prompt was rendered from, and whether it may be cut."""
        self.body: tuple[str, bytes] | None = None
        """The API and the request as it has it, where a shadow may have to be asked the same."""
        self.listener: Callable[[], Callable[[int, str], None] | None] = lambda: None
        """As `RoutedName.listener`."""

    @property
    def name(self) -> str:
        return self.public.rule.name

    def keep(self, api: str, body: bytes) -> None:
        """As `RoutedName.keep`. Embeddings have no shadows."""
        if self.public.shadows is not None and api != "embeddings":
            self.body = api, body

    def call(self, table: TrafficTable) -> RoutedCall:
        """The target has accepted the request."""
        return RoutedCall(table, self.public, self.target.id, counts=not self.is_shadow)


def choice_in(context: RequestContext) -> TargetChoice:
    choice = context.routed
    if not isinstance(choice, TargetChoice):
        raise TypeError("the request has not been given to a target")
    return choice


class RoutedCall:
    """What a target has accepted; it ends once, however often it is told to."""

    def __init__(self, table: TrafficTable, name: PublicName, target: str, *, counts: bool = True) -> None:
        self._table = table
        self._route = name.route
        self._target = target
        self._began = table.clock()
        self._seconds: float | None = None
        self._ended = not counts
        if counts:
            name.route.accepted(target)

    def responded(self, seconds: float | None = None) -> None:
        """There is a first response, so long after the beginning; None: now. Idempotent."""
        if self._seconds is None:
            self._seconds = self._table.clock() - self._began if seconds is None else seconds

    def end(self, outcome: Outcome) -> None:
        """Idempotent."""
        if not self._ended:
            self._ended = True
            self._route.ended(self._target, outcome, self._seconds, self._table.clock())
