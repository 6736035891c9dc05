"""What a model writes that knows nothing but its grammar."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from penstock.tokenizers.grammars import CompiledGrammar, GrammarCompiler, GrammarError, MaskFiller, TokenMatcher
from support.models import make_tokenizer

_FILLER = MaskFiller(1)


def allowed_next(matchers: Sequence[TokenMatcher], vocab_size: int) -> Any:
    """[n, vocab]: whether the token may come next."""
    masks = np.zeros((len(matchers), -(-vocab_size // 32)), np.int32)
    _FILLER.fill(matchers, masks)
    return np.unpackbits(masks.view(np.uint8), axis=1, count=vocab_size, bitorder="little").view(np.bool_)


class BlindWriter:
    """Writes by drawing among the allowed tokens, one for each byte, and one for each of some tags."""

    def __init__(self, folder: Path, tags: Sequence[str] = (), *, special: bool = False) -> None:
        """`special`: the tags are special tokens, as a tokenizer's files mark them."""
        self._tokenizer = make_tokenizer()
        self._tokenizer.add_tokens(list(tags), special_tokens=special)
        self._tokenizer.save_pretrained(folder)
        self._eos: int = self._tokenizer.convert_tokens_to_ids("<|im_end|>")
        self.added_texts: dict[str, int] = self._tokenizer.get_added_vocab()
        self._vocab_size = len(self._tokenizer)
        self._compiler = GrammarCompiler(folder, self._vocab_size, [self._eos])
        self._compile = cache(self._compiler.compile)

    def write(
        self,
        kind: str,
        grammar: str,
        seed: int,
        thought: tuple[str, str] | None = None,
        preface: str = "",
        longest: int = 3000,
        begun: Sequence[int] = (),
    ) -> str:
        """Fails if there are more than `longest` tokens. `begun`: those that are written already. Raises
        GrammarError."""
        matcher = self._compile(kind, grammar, thought, preface).start(begun)
        draw = random.Random(seed)
        token_ids = list(begun)
        while not matcher.is_complete:
            assert len(token_ids) < longest, self._tokenizer.decode(token_ids)
            allowed = np.flatnonzero(allowed_next([matcher], self._vocab_size)).tolist()
            assert allowed
            others = [token_id for token_id in allowed if token_id != self._eos]
            ends = not others or (len(others) < len(allowed) and draw.random() < 0.3)
            token_id = self._eos if ends else draw.choice(others)
            matcher.consume([token_id])
            if matcher.problem:
                raise GrammarError(matcher.problem)
            if token_id == self._eos:
                break
            token_ids.append(token_id)
        text: str = self._tokenizer.decode(token_ids)
        return text

    def compiled(self, kind: str, grammar: str) -> CompiledGrammar:
        """What `write` follows."""
        return self._compile(kind, grammar, None, "")

    def token_ids(self, text: str, *, spelled: bool = False) -> list[int]:
        """`spelled`: with the tags in single letters."""
        tokenizer = make_tokenizer() if spelled else self._tokenizer
        found: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return found

    def takes(
        self, kind: str, grammar: str, text: str, thought: tuple[str, str] | None = None, preface: str = ""
    ) -> bool:
        """Whether this is a whole output."""
        matcher = self._compile(kind, grammar, thought, preface).start([])
        for token_id in self.token_ids(text):
            if matcher.is_complete:
                return False
            matcher.consume([token_id])
        if not matcher.is_complete:
            matcher.consume([self._eos])
        return matcher.is_complete
