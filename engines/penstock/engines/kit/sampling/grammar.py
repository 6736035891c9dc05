"""Which tokens a request's grammar allows next, computed while the model computes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.engines.contract.messages import GRAMMAR
from penstock.engines.errors import InvalidRequestError, PenstockError

if TYPE_CHECKING:  # imported when the first request needs it
    from penstock.tokenizers.grammars import BitMasks, MaskFiller, TokenMatcher

Ids = npt.NDArray[np.int64]


class TokenMask(NamedTuple):
    """Some of the vocabulary, by the shorter of two lists."""

    ids: Ids
    """Ascending."""
    allowed: bool
    """These and no others are allowed; else all but these."""


class GrammarState:
    """One output on its way through its grammar. Tokens are taken in where masks are computed, so that the model need
    not wait for it."""

    def __init__(self, matcher: TokenMatcher, masks: MasksAhead) -> None:
        self.matcher = matcher
        self.failure: PenstockError | None = None
        """Why the output cannot be continued."""
        self._masks = masks
        self._ahead: Future[None] | None = None
        self._unread: list[int] = []
        """Tokens that the matcher has not taken in yet."""
        self._mask: TokenMask | None = None
        """Of the next token, if it is known."""
        self.note_problem()

    def mask(self) -> TokenMask | None:
        """Of the next token; None: there is a `failure`."""
        if self._mask is None:  # else the job is done with this state
            self._wait()
            if self._mask is None and self.failure is None:
                self._masks.compute([self])
        self._ahead = None
        return None if self.failure else self._mask

    @property
    def is_complete(self) -> bool:
        """Nothing but the end may follow."""
        self._wait()
        self.catch_up()
        return self.matcher.is_complete

    def append(self, token_id: int) -> None:
        """The next token, which the mask allowed."""
        self._mask = None
        self._unread.append(token_id)

    def catch_up(self) -> None:
        """The matcher takes in what it has not."""
        if self._unread:
            self.matcher.consume(self._unread)
            self._unread.clear()

    def computed_by(self, job: Future[None]) -> None:
        """This job calls `catch_up` and `found`."""
        self._ahead = job

    def found(self, mask: TokenMask) -> None:
        """The mask of the next token."""
        if not self.failure and len(mask.ids) == 0 and mask.allowed:
            message = "The output cannot be continued: the grammar allows no token here."
            self.failure = InvalidRequestError(message, param=GRAMMAR)
        self._mask = mask

    @property
    def needs_mask(self) -> bool:
        return self._mask is None and self._ahead is None and self.failure is None and not self.is_free

    @property
    def is_free(self) -> bool:
        """Every token is allowed next: there is no mask. Unless one is being computed, tokens are taken in here."""
        if self._ahead is None:
            self.catch_up()
        return self.matcher.is_free

    def note_problem(self) -> None:
        """Looks whether the matcher has one now."""
        problem = self.matcher.problem
        if problem and self.failure is None:
            self.failure = InvalidRequestError(f"The output cannot be kept to its grammar: {problem}", param=GRAMMAR)

    def _wait(self) -> None:
        if self._ahead is not None:
            self._ahead.result()
            self._ahead = None


class MasksAhead:
    """Computes the masks of a step's requests in a thread, without the interpreter's lock for most of the time."""

    def __init__(self, filler: MaskFiller, vocab_size: int) -> None:
        self._filler = filler
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, "grammar-masks")

    def begin(self, states: Sequence[GrammarState]) -> None:
        """Those that know theirs already are left alone. Nothing else may use these states until `mask` was called."""
        states = [state for state in states if state.needs_mask]
        if states:
            job = self._thread.submit(self.compute, states)
            for state in states:
                state.computed_by(job)

    def compute(self, states: Sequence[GrammarState]) -> None:
        """Now, in this thread."""
        for state, bits in zip(states, self.bit_masks(states), strict=True):
            state.found(_shorter_list(bits, self._vocab_size))

    def bit_masks(self, states: Sequence[GrammarState]) -> BitMasks:
        """[n, ceil(vocab / 32)] of the next tokens, as `MaskFiller.fill` gives them; those of states with a `failure`
        mean nothing."""
        for state in states:
            state.catch_up()
        masks = self._filler.fill([state.matcher for state in states])
        for state in states:
            state.note_problem()
        return masks


def _shorter_list(words: npt.NDArray[np.int32], vocab_size: int) -> TokenMask:
    bits = np.unpackbits(words.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
    allowed = bool(np.count_nonzero(bits) <= vocab_size // 2)
    return TokenMask(np.flatnonzero(bits if allowed else ~bits), allowed)
