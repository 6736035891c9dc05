"""A tokenizer as prompts need it: it counts, and it names words and ids that make counts exact."""

from __future__ import annotations

import re
from functools import cached_property, lru_cache
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from penstock.loadtest.errors import LoadTestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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
        found = sorted({match[1] for match in map(_WORD.fullmatch, tokens) if match})
        rng = Random(0)
        if len(found) > _TRIED:
            found = sorted(rng.sample(found, _TRIED))
        found = [word for word in found if self.count(word) == 1]
        found = [word for word in found if self.count(f"{found[0]} {word}") == 2]
        if len(found) < _ENOUGH:
            return []
        trials = (" ".join(rng.choices(found, k=_TRIAL_WORDS)) for _ in range(_TRIALS))
        return found if all(self.count(text) == _TRIAL_WORDS for text in trials) else []


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
