"""What the data plane asks about names that several models serve. `traffic/` implements it, where there are rules."""

from __future__ import annotations

from typing import Protocol

from penstock.gateway.front.context import RequestContext
from penstock.gateway.front.record import Outcome
from penstock.gateway.llm.chat_texts import ChatValues
from penstock.gateway.llm.choice_output import ChoiceDelta
from penstock.gateway.llm.generate_request import GenerateRequest
from penstock.gateway.llm.models import NameHolder


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
