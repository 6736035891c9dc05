"""Tokens that a request must not have: all but some, and those that would complete a bad word."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.kit.sampling.masks import TokenMask

Ids = npt.NDArray[np.int64]


class TokenLimits:
    """Of one request, with the end of its output as far as bad words reach."""

    def __init__(self, params: SamplingParams, output: Sequence[int]) -> None:
        allowed = params.allowed_token_ids
        self._allowed = None if allowed is None else _ascending(allowed)
        self._single = np.unique(np.array([word[0] for word in params.bad_words if len(word) == 1], np.int64))
        self._words = [word for word in params.bad_words if len(word) > 1]
        self._longest = max(map(len, self._words), default=1)
        self._end = list(output)[-self._longest :]

    @property
    def field(self) -> str:
        """Of the request: the narrower one where it has both."""
        return "bad_words" if self._allowed is None else "allowed_token_ids"

    @property
    def depends_on_output(self) -> bool:
        return bool(self._words)

    def append(self, token_id: int) -> None:
        """Takes note of the output's next token."""
        if self._words:
            self._end = [*self._end, token_id][-self._longest :]

    def narrowed(self, mask: TokenMask | None) -> TokenMask:
        """What is left of a mask; None: of the whole vocabulary."""
        banned = self._banned()
        if self._allowed is None:
            if mask is None:
                return TokenMask(banned, allowed=False)
            if mask.allowed:
                return TokenMask(_without(mask.ids, banned), allowed=True)
            more = _without(banned, mask.ids)
            return TokenMask(np.sort(np.concatenate([mask.ids, more]), kind="stable"), allowed=False)
        left = _without(self._allowed, banned)
        if mask is not None and mask.allowed:
            left = np.intersect1d(left, mask.ids, assume_unique=True)
        elif mask is not None:
            left = _without(left, mask.ids)
        return TokenMask(left, allowed=True)

    def _banned(self) -> Ids:
        complete = [word[-1] for word in self._words if tuple(self._end[1 - len(word) :]) == word[:-1]]
        return np.union1d(self._single, np.array(complete, np.int64)) if complete else self._single


def _ascending(ids: Sequence[int]) -> Ids:
    array = np.asarray(ids, np.int64)
    return array if (array[1:] > array[:-1]).all() else np.unique(array)


def _without(ids: Ids, excluded: Ids) -> Ids:
    """Both have each id once, ascending. For 128,000 ids it would take numpy 50 ms of each step to see to that."""
    return np.setdiff1d(ids, excluded, assume_unique=True) if len(excluded) else ids
