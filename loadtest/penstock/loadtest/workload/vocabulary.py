"""A tokenizer as prompts need it: it counts, and it names words and ids that make counts exact."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from random import Random
from string import ascii_lowercase
from typing import TYPE_CHECKING, Generic, TypeVar

from penstock.loadtest.errors import LoadTestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
_TEXT = """
    the of and to in is was for that on with he it as at his by be from have had are not this but were her she you
    they all one there been would their when who will more no if out so what up said about than them can only other time
    new some could these two may first then do any my now such like our over man me even most made after also did many
    off before must well back through years where much your way down should because long each just those people too good
    very still own see work life get here between both being under never day same another know while last might us great
    old year come since against go came right used take three small large part place found every house world high set
    end put need keep turn hand home side water room night point number group always order means word line young fact
    area power light city name few head kind thing things half best far given early white open next free state look find
    children women country system question during without again around however form
"""

COMMON = tuple(_TEXT.split())
"""Frequent enough in English that the vocabularies of most models have each as one token."""


_MARKERS = str.maketrans({"\u0120": " ", "\u2581": " "})
"""How vocabularies write a blank: byte-level BPE and SentencePiece."""
_WORD = re.compile(r" ?([a-z]{2,12})")
_TWO_WORDS = re.compile(r"[a-z ]*[a-z] [a-z ]*")
_TRIED = 4000
_ENOUGH = 64
_TRIAL_WORDS, _TRIALS = 500, 4


class Vocabulary:
    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.added = tokenizer.num_special_tokens_to_add(False)
        """Special tokens, such as BOS, that the tokenizer puts around a text by itself."""

    def count(self, text: str) -> int:
        """Tokens of a text, without those added around it."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    @cached_property
    def ids(self) -> list[int]:
        """Those of ordinary tokens, rising."""
        added = set(self._tokenizer.get_added_tokens_decoder())
        ids = sorted(set(self._tokenizer.get_vocab().values()) - added)
        if not ids:
            raise LoadTestError("tokenizer: it has nothing but special tokens")
        return ids

    @cached_property
    def words(self) -> list[str]:
        """Words of one token each, at the beginning of a text and after a blank, so that n of them with blanks between
        have n tokens whatever their order. Empty if the tokenizer has few such words, or joins words."""
        tokens = [token.translate(_MARKERS) for token in self._tokenizer.get_vocab()]
        if any(_TWO_WORDS.fullmatch(token) for token in tokens):
            return []  # a token that spans words: the count of a text is not the sum of its words'
        words = sorted({match[1] for match in map(_WORD.fullmatch, tokens) if match})
        rng = Random(0)
        if len(words) > _TRIED:
            words = sorted(rng.sample(words, _TRIED))
        words = [word for word in words if self.count(word) == 1]
        words = [word for word in words if self.count(f"{words[0]} {word}") == 2]
        if len(words) < _ENOUGH:
            return []
        trials = (" ".join(rng.choices(words, k=_TRIAL_WORDS)) for _ in range(_TRIALS))
        return words if all(self.count(text) == _TRIAL_WORDS for text in trials) else []


@lru_cache(maxsize=4)
def load_vocabulary(path: str) -> Vocabulary:
    """Of a tokenizer.json, or of the folder that holds it. Raises LoadTestError."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise LoadTestError("tokenizer: counting tokens needs the package `tokenizers`") from None
    file = Path(path)
    if file.is_dir():
        file /= "tokenizer.json"
    if not file.is_file():
        raise LoadTestError(f"tokenizer: there is no file {file}")
    try:
        return Vocabulary(Tokenizer.from_file(str(file)))
    except Exception as error:  # the library raises nothing narrower
        raise LoadTestError(f"tokenizer: {file}: {error}") from None


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
