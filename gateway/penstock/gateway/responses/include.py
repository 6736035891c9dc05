"""What `include` may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.gateway.front.context import RequestContext

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"


@dataclass(frozen=True, slots=True)
class Include:
    """What the items of a response have beside what they always have."""

    logprobs: bool = False
    encrypted_reasoning: bool = False

    @staticmethod
    def parse(names: Sequence[str] | None, context: RequestContext) -> Include:
        """What there is not is left out, and `context` notes it."""
        if not names:
            return NOTHING
        if not {LOGPROBS, ENCRYPTED_REASONING}.issuperset(names):
            context.ignore("include", f"there are only {LOGPROBS} and {ENCRYPTED_REASONING}.")
        return Include(LOGPROBS in names, ENCRYPTED_REASONING in names)


NOTHING = Include()
