"""Matchers that follow outputs through their grammars, and masks of the tokens allowed next."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import llguidance
import numpy as np
import numpy.typing as npt
from llguidance.numpy import fill_next_token_bitmask_par

BitMasks = npt.NDArray[np.int32]

_WORN_OUT = "lexer error"
"""In llguidance's words: the states or expressions of a lexer, which all matchers of a grammar add to, are as many as
may be."""


class TokenMatcher:
    """Follows one output through its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher | None, on_worn_out: Callable[[], None] | None = None) -> None:
        """Without a matcher, the output may be any text. `on_worn_out`: called when a `problem` is that of all matchers
        of this grammar."""
        self.matcher = matcher
        self._on_worn_out = on_worn_out
        self.can_be_free = matcher is None
        """`is_free` may say so, now or later."""

    def consume(self, token_ids: Sequence[int]) -> None:
        """Takes in the output's next tokens. What comes behind a complete output, as with `ignore_eos`, changes
        nothing."""
        if self.matcher is None:
            return
        for token_id in token_ids:
            if self.matcher.is_stopped():
                return
            self.matcher.consume_token(token_id)

    def forced(self) -> list[int]:
        """Tokens that come next because the grammar leaves no other text, split as the model's tokenizer splits it.
        `consume` takes them in."""
        if self.matcher is None or self.matcher.is_stopped():
            return []
        return self.matcher.compute_ff_tokens()

    @property
    def is_complete(self) -> bool:
        """Nothing but the end may follow."""
        return self.matcher is not None and bool(self.matcher.is_stopped()) and not self.problem

    @property
    def is_free(self) -> bool:
        """Every token is allowed next, so that no mask is needed."""
        return self.matcher is None

    def narrow(self, mask: npt.NDArray[np.int32]) -> None:
        """Takes away from a row of `MaskFiller.fill` what the grammar knows nothing of."""

    @property
    def problem(self) -> str:
        """Why this output can no longer be followed: it took a token that was not allowed, or the grammar became too
        complex. Empty: all is well."""
        if self.matcher is None or not self.matcher.is_error():
            return ""
        problem = str(self.matcher.get_error()).split("\n", 1)[0]
        if _WORN_OUT in problem and self._on_worn_out is not None:
            self._on_worn_out()
        return problem


class MaskFiller:
    """Computes masks for several outputs at once, without the interpreter's lock."""

    def __init__(self, num_threads: int) -> None:
        self._executor = llguidance.LLExecutor(num_threads)

    def fill(self, matchers: Sequence[TokenMatcher], masks: BitMasks) -> None:
        """`masks` [n, ceil(vocab / 32)]: bit i of word w says whether token 32 * w + i is allowed. A matcher with a
        `problem` afterwards has a mask without meaning."""
        bound = [(one.matcher, row) for row, one in enumerate(matchers) if one.matcher is not None]
        if len(bound) < len(matchers):
            masks[:] = -1
        if bound:
            fill_next_token_bitmask_par(self._executor, bound, masks)
        for matcher, mask in zip(matchers, masks, strict=True):
            matcher.narrow(mask)
