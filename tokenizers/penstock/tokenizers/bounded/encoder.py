"""Encodes long texts piece by piece, and stops when they have too many tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import tokenizers

from ..errors import PromptTooLong, TokenizerError
from .cuts import Cuts, read_cuts
from .longest_token import LongestToken, read_longest_token

WHOLE = 32768
"""Texts of up to so many characters are encoded in one call; longer ones in pieces that are hardly longer."""
_PROBE = "a"

Encode = Callable[[str, bool], list[int]]
"""(text, whether to add special tokens) to ids, in one call of the library."""


class BoundedEncoder:
    """What is known about a tokenizer is found out when the first long text comes. Safe to use from several threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        encode: Encode,
        *,
        whole: int = WHOLE,
        chars_per_token: int = 64,
        spare_chars: int = 65536,
    ) -> None:
        """The last two bound a text of which neither cuts nor the least number of tokens can be known: it may have
        `chars_per_token` for each token, and `spare_chars`."""
        self._backend = backend
        self._encode = encode
        self._whole = whole
        self._chars_per_token = chars_per_token
        self._spare_chars = spare_chars

    def encode(self, text: str, add_special_tokens: bool, limit: int) -> list[int]:
        """The same ids as in one call. Raises PromptTooLong where a long text has more than `limit`, unless that is
        only seen at its end: then the caller gets them all."""
        if len(text) <= self._whole:
            return self._encode(text, add_special_tokens)
        if self._cuts is None or self._affixes is None:
            self._check(text, limit, limit)
            return self._encode(text, add_special_tokens)
        before, behind = self._affixes if add_special_tokens else ([], [])
        ids, start, room = list(before), 0, limit - len(behind)
        while start < len(text):
            if len(ids) > room:
                raise PromptTooLong(limit)
            end = self._end_of_piece(self._cuts, text, start, room - len(ids), limit)
            ids += self._encode(text[start:end], False)
            start = end
        return ids + behind

    def _end_of_piece(self, cuts: Cuts, text: str, start: int, room: int, limit: int) -> int:
        """Where to cut next. Raises PromptTooLong when what cannot be cut has more than `room` tokens."""
        at, step = start + self._whole, self._whole
        while at < len(text):
            until = min(at + step, len(text))
            cut = cuts.next(text, start, at, until)
            if cut is not None:
                return cut
            self._check(text[start:until], room, limit)
            at, step = until, 2 * step  # from the start each time, but only a few times
        return len(text)

    def _check(self, text: str, room: int, limit: int) -> None:
        """Refuses what cannot be encoded in pieces and has more than `room` tokens, though text may follow."""
        if self._longest_token is None:
            if len(text) > self._chars_per_token * room + self._spare_chars:
                raise PromptTooLong(limit, certain=False)
        # The last token may reach into what follows, and its other characters may make it the longest of all.
        elif self._fewest_tokens(self._longest_token, text) - self._longest_token.most > room:
            raise PromptTooLong(limit)

    @staticmethod
    def _fewest_tokens(longest: LongestToken, text: str) -> int:
        try:
            return longest.fewest_tokens(text)
        except UnicodeEncodeError:
            raise TokenizerError("text is not valid Unicode") from None

    @cached_property
    def _cuts(self) -> Cuts | None:
        return read_cuts(self._backend)

    @cached_property
    def _longest_token(self) -> LongestToken | None:
        return read_longest_token(self._backend)

    @cached_property
    def _affixes(self) -> tuple[list[int], list[int]] | None:
        """The ids that are added before and behind those of every text."""
        bare, wrapped = self._encode(_PROBE, False), self._encode(_PROBE, True)
        places = [at for at in range(len(wrapped)) if wrapped[at : at + len(bare)] == bare]
        if not bare or len(places) != 1:
            return None
        return wrapped[: places[0]], wrapped[places[0] + len(bare) :]
