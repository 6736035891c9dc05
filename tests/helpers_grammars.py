"""What a model writes that knows nothing but its grammar."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from helpers_models import make_tokenizer
from penstock.tokenizers.grammars import GrammarCompiler, MaskFiller

VOCAB_SIZE = 259


class BlindWriter:
    """Writes by drawing among the allowed tokens, one for each byte."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = make_tokenizer()
        self._tokenizer.save_pretrained(folder)
        self._eos: int = self._tokenizer.convert_tokens_to_ids("<|im_end|>")
        self._compiler = GrammarCompiler(folder, VOCAB_SIZE, [self._eos])
        self._filler = MaskFiller(VOCAB_SIZE, 1)

    def write(
        self,
        kind: str,
        grammar: str,
        seed: int,
        thought: tuple[str, str] | None = None,
        preface: str = "",
        longest: int = 3000,
    ) -> str:
        """Fails if there are more than `longest` tokens. Raises GrammarError."""
        matcher = self._compiler.compile(kind, grammar, thought, preface).start([])
        draw = random.Random(seed)
        token_ids: list[int] = []
        while not matcher.is_complete:
            assert len(token_ids) < longest, self._tokenizer.decode(token_ids)
            bits = self._filler.fill([matcher]).view(np.uint8)
            allowed = np.flatnonzero(np.unpackbits(bits, count=VOCAB_SIZE, bitorder="little")).tolist()
            assert allowed
            others = [token_id for token_id in allowed if token_id != self._eos]
            ends = not others or (len(others) < len(allowed) and draw.random() < 0.3)
            token_id = self._eos if ends else draw.choice(others)
            matcher.consume([token_id])
            assert not matcher.problem
            if token_id == self._eos:
                break
            token_ids.append(token_id)
        text: str = self._tokenizer.decode(token_ids)
        return text

    def takes(
        self, kind: str, grammar: str, text: str, thought: tuple[str, str] | None = None, preface: str = ""
    ) -> bool:
        """Whether this is a whole output."""
        matcher = self._compiler.compile(kind, grammar, thought, preface).start([])
        token_ids = self._tokenizer.encode(text, add_special_tokens=False)
        matcher.consume([*token_ids, self._eos])
        return matcher.is_complete
