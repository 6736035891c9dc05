"""What synthetic prompts are made of: words of one token, token ids, or text fitted to its count."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain
from random import Random
from string import ascii_lowercase
from typing import Generic, TypeVar

from penstock.loadtest.errors import LoadTestError
from penstock.loadtest.workload.common_words import COMMON
from penstock.loadtest.workload.vocabulary import Vocabulary

Piece = TypeVar("Piece", str, list[int])
Unit = TypeVar("Unit", str, int)

_NUMBER_UNITS = 4
_STRIDE = 31
_ATTEMPTS = 20
_BEFORE = "a"


class Source(ABC, Generic[Piece]):
    """All that it draws follows from the given random numbers."""

    @abstractmethod
    def piece(self, tokens: int, rng: Random) -> Piece:
        """Of equal random numbers, a shorter one is the beginning of a longer one, but for fitted text."""

    @abstractmethod
    def prompt(self, lead: Sequence[Piece], lead_tokens: int, tokens: int, rng: Random, number: int | None) -> Piece:
        """The pieces of `lead`, then `tokens` (at least 1) more.

        What follows the lead tells its `number`, if it has one, so that prompts of different numbers differ early:
        two that are equal by chance would be served from a prefix cache.
        """


class Words(Source[str]):
    """A token is a word."""

    def __init__(self, words: Sequence[str], seed: int) -> None:
        self._words = _shuffled(words, seed)

    def piece(self, tokens: int, rng: Random) -> str:
        return " ".join(rng.choices(self._words, k=tokens))

    def prompt(self, lead: Sequence[str], lead_tokens: int, tokens: int, rng: Random, number: int | None) -> str:
        return " ".join([*lead, *_numbered(rng.choices(self._words, k=tokens), self._words, number)])


class TokenIds(Source[list[int]]):
    def __init__(self, ids: Sequence[int], seed: int) -> None:
        self._ids = _shuffled(ids, seed)

    def piece(self, tokens: int, rng: Random) -> list[int]:
        return rng.choices(self._ids, k=tokens)

    def prompt(
        self, lead: Sequence[list[int]], lead_tokens: int, tokens: int, rng: Random, number: int | None
    ) -> list[int]:
        return [*chain.from_iterable(lead), *_numbered(rng.choices(self._ids, k=tokens), self._ids, number)]


class FittedWords(Source[str]):
    """Text for tokenizers that have no words of one token, or join words: encoded again and again until it fits."""

    def __init__(self, vocabulary: Vocabulary, seed: int) -> None:
        self._count = vocabulary.count
        self._words = _shuffled(COMMON, seed)

    def piece(self, tokens: int, rng: Random) -> str:
        """Counted as it is after other text, where a blank before it may be a token; prompts make up for the first."""
        return self.prompt((_BEFORE,), self._count(_BEFORE), tokens, rng, None).removeprefix(f"{_BEFORE} ")

    def prompt(self, lead: Sequence[str], lead_tokens: int, tokens: int, rng: Random, number: int | None) -> str:
        """Raises LoadTestError when nothing of that length is found. Pieces count otherwise together than alone: of
        many, the last may lose some words."""
        before = [word for piece in lead for word in piece.split(" ")]
        for _ in range(_ATTEMPTS):
            words = _numbered(rng.choices(self._words, k=2 * tokens), self._words, number)
            text = self._fit(before + words, lead_tokens + tokens, rng)
            if text is not None:
                return text
        raise LoadTestError(f"tokenizer: no text of exactly {lead_tokens + tokens} tokens was found")

    def _fit(self, words: list[str], tokens: int, rng: Random) -> str | None:
        """As many of the words as there is room for, and letters up to the count."""

        def excess(length: int) -> int:
            return self._count(" ".join(words[:length])) - tokens

        text = " ".join(words[: bisect_right(range(len(words) + 1), 0, key=excess) - 1])
        for _ in range(4 * _ATTEMPTS):
            count = self._count(text)
            if count >= tokens:
                return text if count == tokens else None
            text += rng.choice(ascii_lowercase)
        return None


def _shuffled(units: Sequence[Unit], seed: int) -> list[Unit]:
    return Random(f"{seed}/units").sample(units, len(units))


def _numbered(units: list[Unit], alphabet: Sequence[Unit], number: int | None) -> list[Unit]:
    """With the first units telling the number, as far as they can: its digits, each moved on by the one before it."""
    if number is None:
        return units
    before = 0
    for place in range(min(_NUMBER_UNITS, len(units))):
        number, digit = divmod(number, len(alphabet))
        before = (digit + _STRIDE * before) % len(alphabet)
        units[place] = alphabet[before]
    return units
