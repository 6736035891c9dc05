"""Sources of guesses for a request's next tokens.

Prompt lookup: the next tokens are guessed from what followed the newest ones when they occurred before (Saxena, "Prompt
Lookup Decoding", 2023). A request may also say what its output will be; then guesses are taken from that. Both cost
nothing to make. A draft model in the runner guesses better, and takes time. How many are made follows how many were
right.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

from penstock.engines.contract.step import TO_BE_DRAFTED

_LONGEST, _SHORTEST = 4, 2
"""Newest tokens that must have occurred before: longer matches first, since they are right more often."""
_FIRST_LENGTH = 3
"""Guesses at first, before it is known how good they are."""
_FIRST_ACCEPTANCE = 0.5
_DRAFT_MODEL_ACCEPTANCE = 0.8
"""Expected of a draft model, whose every guess follows the newest token."""
_FORGOTTEN = 0.01
"""Part of what was seen of a draft model that each token makes forgotten."""
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 512
"""Tokens without a guess after guesses that were all wrong; doubled each time."""
MAX_VOCAB_SIZE = sys.maxunicode + 1
"""Token ids are kept as characters."""


class Guesser(ABC):
    """Guesses for one request. How many follows how many were right."""

    uses_draft_model = False
    """A guess costs a forward pass of the draft model."""

    def __init__(self, max_length: int) -> None:
        self._num_tokens = 0
        """As far as `append` was told: pauses are counted in them."""
        self._max_length = max_length
        self._length = min(_FIRST_LENGTH, max_length)
        self._pause = _FIRST_PAUSE
        self._resume_at = 0
        """Guesses are made again from this number of known tokens on."""
        self.acceptance = _FIRST_ACCEPTANCE
        """Moving average of the share of guesses that were right."""

    @abstractmethod
    def append(self, token_ids: Sequence[int]) -> None:
        """The request's next tokens are known."""

    @abstractmethod
    def guess(self, limit: int) -> list[int]:
        """At most `limit` tokens that may come next; often none."""

    def _count(self, limit: int) -> int:
        """How many to guess now, at most `limit`."""
        return max(0, min(self._length, limit)) if self._num_tokens >= self._resume_at else 0

    def verified(self, num_guessed: int, num_right: int) -> None:
        """Adapts how many are guessed. Called after `append`."""
        self.acceptance += 0.25 * (num_right / num_guessed - self.acceptance)
        if num_right == num_guessed:
            self._length = min(2 * self._length, self._max_length)
            self._pause = _FIRST_PAUSE
        elif num_right:
            self._length = max(1, min(self._length, num_right + 1))
        else:
            self.missed()

    def missed(self) -> None:
        """Guesses were wrong, or a step was held back for guesses that the next token did not lead to: shorter ones
        from now on, and behind the shortest a pause, each longer than the last."""
        if self._length > 1:
            self._length //= 2
        else:
            self._resume_at = self._num_tokens + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self.acceptance = max(self.acceptance, _FIRST_ACCEPTANCE)  # after the pause they get another chance


class DraftModelGuesses(Guesser):
    """Says how many guesses the runner's draft model should make: the tokens are its own affair."""

    uses_draft_model = True

    def __init__(self, max_length: int) -> None:
        super().__init__(max_length)
        self.acceptance = _DRAFT_MODEL_ACCEPTANCE

    def append(self, token_ids: Sequence[int]) -> None:
        self._num_tokens += len(token_ids)
        # What was seen long ago counts less: without guesses nothing else would ever change it.
        self.acceptance += _FORGOTTEN * (_DRAFT_MODEL_ACCEPTANCE - self.acceptance)

    def guess(self, limit: int) -> list[int]:
        return [TO_BE_DRAFTED] * self._count(limit)

    def verified(self, num_guessed: int, num_right: int) -> None:
        # Guesses behind the first wrong one say nothing about how good the draft model is.
        super().verified(num_right + (num_right < num_guessed), num_right)


class PromptLookup(Guesser):
    """Guesses what followed the newest tokens before."""

    def __init__(self, token_ids: Iterable[int], max_length: int) -> None:
        super().__init__(max_length)
        self._text = ""
        """All known tokens, a character for each: text is searched fast, and only from character to character."""
        PromptLookup.append(self, token_ids)

    def append(self, token_ids: Iterable[int]) -> None:
        self._text += "".join(map(chr, token_ids))
        self._num_tokens = len(self._text)

    def guess(self, limit: int) -> list[int]:
        count = self._count(limit)
        if count < 1:
            return []
        for size in range(_LONGEST, _SHORTEST - 1, -1):
            at = _find_last(self._text, size)
            if at >= 0:
                behind = self._text[at + size : at + size + count]
                # what repeats itself is expected to continue
                return [ord(behind[i % len(behind)]) for i in range(count)]
        return []


class PredictedOutput(PromptLookup):
    """Guesses for a request that says what its output will be. Where the output goes another way, they begin again
    behind the newest tokens, once these occur later in the prediction."""

    def __init__(self, prediction: Iterable[int], max_length: int) -> None:
        super().__init__((), max_length)
        self._prediction = "".join(map(chr, prediction))
        self._next: int | None = 0
        """Where the output is in the prediction; None: nowhere."""
        self._passed = 0
        """How far it has been."""
        self.num_right = self.num_wrong = 0

    def append(self, token_ids: Iterable[int]) -> None:
        for token in map(chr, token_ids):
            self._text += token
            self._num_tokens += 1
            if self._next is not None and self._prediction[self._next : self._next + 1] == token:
                self._next += 1
            else:
                self._next = self._place_of_newest()
            self._passed = max(self._passed, self._next or 0)

    def guess(self, limit: int) -> list[int]:
        count = self._count(limit)
        if self._next is None or count < 1:
            return []
        return [ord(token) for token in self._prediction[self._next : self._next + count]]

    def verified(self, num_guessed: int, num_right: int) -> None:
        super().verified(num_guessed, num_right)
        self.num_right += num_right
        self.num_wrong += num_guessed - num_right

    def _place_of_newest(self) -> int | None:
        """Behind the newest tokens, at their next occurrence."""
        newest = self._text[-_LONGEST:]
        at = self._prediction.find(newest, self._passed) if len(newest) >= _SHORTEST else -1
        return at + len(newest) if at >= 0 else None


def _find_last(text: str, size: int) -> int:
    """Where the last `size` tokens occurred before, most recently: the place of the first of them, or -1."""
    return text.rfind(text[-size:], 0, len(text) - 1)
