"""What `include` may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.engines.errors import InvalidRequestError, UnsupportedError

LOGPROBS = "message.output_text.logprobs"
ENCRYPTED_REASONING = "reasoning.encrypted_content"
_ELSEWHERE = frozenset(
    {
        "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
        "message.input_image.image_url", "web_search_call.action.sources", "web_search_call.results",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Include:
    """What the items of a response have beside what they always have."""

    logprobs: bool = False
    encrypted_reasoning: bool = False

    @staticmethod
    def parse(names: Sequence[str] | None) -> Include:
        """Raises InvalidRequestError, UnsupportedError."""
        for name in names or ():
            if name in _ELSEWHERE:
                raise UnsupportedError(f"include: '{name}' is not supported.", param="include")
            if name not in (LOGPROBS, ENCRYPTED_REASONING):
                message = f"include may have '{LOGPROBS}' and '{ENCRYPTED_REASONING}', and nothing else."
                raise InvalidRequestError(message, param="include")
        return Include(LOGPROBS in (names or ()), ENCRYPTED_REASONING in (names or ()))
