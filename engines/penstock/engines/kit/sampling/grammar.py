"""Masks of the tokens that requests' grammars allow next, and the tokens that they force, computed while the model
computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from penstock.engines.contract.messages import GRAMMAR
from penstock.engines.errors import InvalidRequestError, PenstockError
from penstock.engines.kit.sampling.masks import BitMasks, TokenMask, bit_masks, shorter_lists

if TYPE_CHECKING:  # imported when the first request needs it
    from penstock.tokenizers.grammars import MaskFiller, TokenMatcher


class GrammarState:
    """One output on its way through its grammar. Tokens are taken in where masks are computed, so that the model need
    not wait for it."""

    def __init__(self, matcher: TokenMatcher, masks: MasksAhead) -> None:
        self.matcher = matcher
        self._masks = masks
        self._looking: Future[None] | None = None
        """Finds what is forced."""
        self._ahead: Future[None] | None = None
        """Finds the mask, behind that."""
        self._unread: list[int] = []
        """Tokens that the matcher has not taken in yet."""
        self._forced: deque[int] = deque()
        """Tokens that come next, since the grammar allows no others. The matcher has taken them in already."""
        self._mask: TokenMask | None = None
        """Of the next token behind the forced ones, if it is known."""
        self._failure: PenstockError | None = None
        """Why there is none behind the forced ones."""
        self.note_problem()

    @property
    def failure(self) -> PenstockError | None:
        """Why the output cannot be continued."""
        return None if self._forced else self._failure

    def mask(self) -> TokenMask | None:
        """Of the next token; None: there is a `failure`."""
        if self._mask is None:  # else the job is done with this state
            self._wait()
            if self._mask is None and self._failure is None:
                self._masks.compute(self)
        self._looking = self._ahead = None
        if self._forced:
            return TokenMask(np.array([self._forced[0]]), allowed=True)
        return None if self._failure else self._mask

    def forced(self) -> list[int]:
        """Tokens that come next, as far as that is known. Waits until it was looked for, if that has begun."""
        if self._looking is not None:
            self._looking.result()
        return list(self._forced)

    @property
    def is_complete(self) -> bool:
        """Nothing but the end may follow."""
        self._wait()
        if self._forced:
            return False
        self.catch_up()
        return self.matcher.is_complete

    def append(self, token_id: int) -> None:
        """The next token, which the mask allowed."""
        if self._forced:
            self._forced.popleft()
        else:
            self._mask = None
            self._unread.append(token_id)

    def catch_up(self) -> None:
        """The matcher takes in what it has not."""
        if self._unread:
            self.matcher.consume(self._unread)
            self._unread.clear()

    def look_for_forced(self) -> None:
        """The matcher takes in what is there, and what must follow."""
        self.catch_up()
        forced = self.matcher.forced()
        if forced:
            self.matcher.consume(forced)
            self._forced.extend(forced)

    def computed_by(self, looking: Future[None], job: Future[None]) -> None:
        """The one calls `look_for_forced`, the other `take_mask`."""
        self._looking, self._ahead = looking, job

    def take_mask(self, mask: TokenMask) -> None:
        """The mask of the next token behind the forced ones."""
        if not self._failure and len(mask.ids) == 0 and mask.allowed:
            message = "The output cannot be continued: the grammar allows no token here."
            self._failure = InvalidRequestError(message, param=GRAMMAR)
        self._mask = mask

    @property
    def needs_mask(self) -> bool:
        return self._mask is None and self._ahead is None and self._failure is None and not self.is_free

    @property
    def is_free(self) -> bool:
        """Every token is allowed next: there is no mask. Where that depends on the tokens, they are taken in here,
        unless a mask is being computed."""
        if not self.matcher.can_be_free:
            return False
        if self._ahead is None:
            self.catch_up()
        return self.matcher.is_free

    def note_problem(self) -> None:
        """Looks whether the matcher has one now."""
        problem = self.matcher.problem
        if problem and self._failure is None:
            self._failure = InvalidRequestError(f"The output cannot be kept to its grammar: {problem}", param=GRAMMAR)

    def _wait(self) -> None:
        if self._ahead is not None:
            self._ahead.result()
            self._looking = self._ahead = None


class MasksAhead:
    """Computes the masks of a step's requests in a thread, without the interpreter's lock for most of the time."""

    def __init__(self, filler: MaskFiller, vocab_size: int) -> None:
        self._filler = filler
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, "grammar-masks")
        self._memory = bit_masks(0, vocab_size)
        """Of the thread, for as many masks as there were at most."""

    def begin(self, states: Sequence[GrammarState]) -> None:
        """Those that know theirs already are left alone. Nothing but `forced` may use these states until `mask` was
        called."""
        states = [state for state in states if state.needs_mask]
        if states:
            looking = self._thread.submit(_look_for_forced, states)
            job = self._thread.submit(self._compute_ahead, states)
            for state in states:
                state.computed_by(looking, job)

    def compute(self, state: GrammarState) -> None:
        """Now, in this thread."""
        state.look_for_forced()
        self._find([state], bit_masks(1, self._vocab_size))

    def fill(self, states: Sequence[GrammarState], masks: BitMasks) -> None:
        """Computes the masks of the next tokens, as `MaskFiller.fill` does, forced or not; those of states with a
        `failure` mean nothing."""
        for state in states:
            state.catch_up()
        self._filler.fill([state.matcher for state in states], masks)
        for state in states:
            state.note_problem()

    def _compute_ahead(self, states: Sequence[GrammarState]) -> None:
        if len(self._memory) < len(states):
            self._memory = bit_masks(len(states), self._vocab_size)
        self._find(states, self._memory[: len(states)])

    def _find(self, states: Sequence[GrammarState], memory: BitMasks) -> None:
        self.fill(states, memory)
        for state, mask in zip(states, shorter_lists(memory, self._vocab_size), strict=True):
            state.take_mask(mask)


def _look_for_forced(states: Sequence[GrammarState]) -> None:
    for state in states:
        state.look_for_forced()
