"""Prompts that are cut to a number of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.engines.errors import InvalidRequestError

Side = Literal["left", "right"]
WHAT_FITS = -1
_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Truncation:
    tokens: int
    """Most that are kept; -1: what the context has room for."""
    side: Side = "left"
    """Where the others are taken away."""

    def applied(self, prompt: list[int], context_length: int, max_tokens: int) -> list[int]:
        """`max_tokens` 0: room for one is left."""
        most = self.tokens if self.tokens != WHAT_FITS else max(context_length - max(max_tokens, 1), 1)
        if len(prompt) <= most:
            return prompt
        return prompt[-most:] if self.side == "left" else prompt[:most]


def truncation(tokens: int | None, side: Side | None) -> Truncation | None:
    """Raises InvalidRequestError."""
    if tokens is None:
        return None
    if tokens != WHAT_FITS and not 1 <= tokens <= _MOST:
        message = "truncate_prompt_tokens must be at least 1, or -1 for what fits."
        raise InvalidRequestError(message, param="truncate_prompt_tokens")
    return Truncation(tokens, side or "left")
