"""Bounds on how long a model thinks: when the tokens are used up, the end of the thought is written for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import llguidance
import numpy as np
import numpy.typing as npt

from ..hf import Tokenizer
from ..reasoning import ThoughtTags
from .matcher import TokenMatcher

_LONGEST_CHARACTER = 4
"""Bytes, in UTF-8."""


class ThoughtBudgetGrammar:
    """Of all outputs with the same tags and the same bound, for one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, tags: ThoughtTags, tokens: int) -> None:
        self.tokens = tokens
        self.inside, self.again = tags.inside, tags.again
        self.openings = tuple(text.encode() for text in tags.openings)
        self.endings = tuple(text.encode() for text in tags.endings)
        self.closing = tokenizer.encode(tags.closing, add_special_tokens=False)
        self.token_bytes = tokenizer.token_bytes
        self.longest_tag = max(map(len, (*self.openings, *self.endings)))
        self.not_behind = _second_tokens(tokenizer, tags.openings) if tags.again else {}
        """Tokens that would begin another thought, by the special token before them."""


def _second_tokens(tokenizer: Tokenizer, openings: Sequence[str]) -> dict[int, int]:
    """Of openings of several tokens. Those of one token may stand: their thought ends at once."""
    encoded = [tokenizer.encode(opening, add_special_tokens=False) for opening in openings]
    return {ids[0]: ids[1] for ids in encoded if len(ids) > 1 and ids[0] in tokenizer.special_ids}


class ThoughtWatch:
    """Follows one output through its thoughts. Tags are looked for in the text, as the parsers do: a tag that is not a
    special token may be split into tokens in several ways."""

    def __init__(self, budget: ThoughtBudgetGrammar) -> None:
        self._budget = budget
        self._inside = budget.inside
        self._over = False
        """There will be no thought any more."""
        self._used = 0
        self._written = 0
        """Tokens of the closing that are there already."""
        self._text = b""
        """The newest, as long as something may be found in it."""
        self._last: int | None = None

    @property
    def forced(self) -> int | None:
        """The one token that comes next."""
        budget = self._budget
        if self._written:
            return budget.closing[self._written]
        beyond = self._used - budget.tokens
        if self._inside and beyond >= 0 and (beyond >= _LONGEST_CHARACTER - 1 or not _ends_in_a_character(self._text)):
            return budget.closing[0]
        return None

    @property
    def barred(self) -> int | None:
        """A token that must not come next."""
        if self._last is None or self._inside or self._used < self._budget.tokens:
            return None
        return self._budget.not_behind.get(self._last)

    def see(self, token_id: int) -> None:
        """Takes in the output's next token."""
        if self._over:
            return
        forced, self._last = self.forced, token_id
        if token_id == forced:
            self._written += 1
            if self._written == len(self._budget.closing):
                self._leave(b"")
            return
        self._written = 0
        self._text += self._budget.token_bytes(token_id)
        if self._inside:
            self._used += 1
            self._look_for_end()
        else:
            self._look_for_beginning()

    def _look_for_beginning(self) -> None:
        if not self._budget.again:
            self._text = self._text.lstrip()
            if any(opening.startswith(self._text) and opening != self._text for opening in self._budget.openings):
                return
        span = _first_of(self._budget.openings, self._text)
        if span is not None and (self._budget.again or span[0] == 0):
            self._inside = True
            self._text = self._text[span[1] :]
            self._look_for_end()
        else:
            self._over = not self._budget.again
            self._forget()

    def _look_for_end(self) -> None:
        span = _first_of(self._budget.endings, self._text)
        if span is None:
            self._forget()
        else:
            self._leave(self._text[span[1] :])

    def _leave(self, rest: bytes) -> None:
        self._inside, self._over = False, not self._budget.again
        self._written, self._text = 0, rest

    def _forget(self) -> None:
        self._text = self._text[-max(self._budget.longest_tag - 1, _LONGEST_CHARACTER) :]


class BudgetedMatcher(TokenMatcher):
    """Follows one output through its thoughts, and through its grammar if it has one."""

    def __init__(
        self, watch: ThoughtWatch, matcher: llguidance.LLMatcher | None, on_worn_out: Callable[[], None] | None = None
    ) -> None:
        super().__init__(matcher, on_worn_out)
        self._watch = watch

    def consume(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            self._watch.see(token_id)
        super().consume(token_ids)

    def forced(self) -> list[int]:
        """None: the budget has a say in each token."""
        return []

    @property
    def is_free(self) -> bool:
        return super().is_free and self._watch.forced is None and self._watch.barred is None

    def narrow(self, mask: npt.NDArray[np.int32]) -> None:
        """The end of a thought waits until the grammar allows it."""
        words = mask.view(np.uint32)
        forced, barred = self._watch.forced, self._watch.barred
        if forced is not None and words[forced // 32] >> (forced % 32) & 1:
            words[:] = 0
            words[forced // 32] = 1 << (forced % 32)
        elif barred is not None:
            words[barred // 32] &= ~np.uint32(1 << (barred % 32))


def _first_of(tags: Sequence[bytes], text: bytes) -> tuple[int, int] | None:
    """Where the first of them begins and ends."""
    spans = [(at, at + len(tag)) for tag in tags if (at := text.find(tag)) >= 0]
    return min(spans, default=None)


def _ends_in_a_character(text: bytes) -> bool:
    """Whether the last character of UTF-8 lacks bytes."""
    for back in range(1, min(_LONGEST_CHARACTER, len(text) + 1)):
        byte = text[-back]
        if byte & 0xC0 != 0x80:  # not one that continues a character
            return byte >= 0xC0 and back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False
