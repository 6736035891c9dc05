"""Which special tokens stand around a text, and around a pair of texts, and how long ones are cut to fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import tokenizers

from .errors import TokenizerError


@dataclass(frozen=True, slots=True)
class JoinedText:
    ids: list[int]
    types: list[int]
    """Which of the two texts each token belongs to, as the model was trained to be told."""


@dataclass(frozen=True, slots=True)
class TextTemplate:
    """Special tokens before, between and behind the texts' own."""

    specials: tuple[JoinedText, ...]
    """One more than there are texts."""
    types: tuple[int, ...]
    """Of each text's own tokens."""

    @property
    def num_specials(self) -> int:
        return sum(len(each.ids) for each in self.specials)

    def join(self, texts: Sequence[Sequence[int]], most: int | None = None, *, cut_start: bool = False) -> JoinedText:
        """`texts`: token ids without special tokens, one or two as the template has. With `most`, the longer text loses
        its last tokens first, until all fit; with `cut_start` its first ones."""
        if most is not None:
            kept = _kept([len(text) for text in texts], max(0, most - self.num_specials))
            texts = [
                text[len(text) - num :] if cut_start else text[:num] for text, num in zip(texts, kept, strict=True)
            ]
        ids, types = list(self.specials[0].ids), list(self.specials[0].types)
        for text, kind, behind in zip(texts, self.types, self.specials[1:], strict=True):
            ids += [*text, *behind.ids]
            types += [kind] * len(text) + behind.types
        return JoinedText(ids, types)


def read_template(backend: tokenizers.Tokenizer, *texts: str) -> TextTemplate:
    """As the backend joins these texts, one or two. Raises TokenizerError where it loses one of them."""
    first, second = texts if len(texts) == 2 else (texts[0], None)
    encoded = backend.encode(first, second)
    tokens = zip(encoded.sequence_ids, encoded.ids, encoded.type_ids, strict=True)
    specials = [JoinedText([], [])]
    types: list[int] = []
    for number, group in groupby(tokens, key=lambda token: token[0]):
        parts = list(group)
        if number is None:
            specials[-1] = JoinedText([part[1] for part in parts], [part[2] for part in parts])
        else:
            types.append(parts[0][2])
            specials.append(JoinedText([], []))
    if len(types) != len(texts):
        raise TokenizerError("the tokenizer does not say how texts are joined")
    return TextTemplate(tuple(specials), tuple(types))


def _kept(lengths: Sequence[int], room: int) -> list[int]:
    """Tokens of each text, as `longest_first` of the `tokenizers` library has it."""
    if sum(lengths) <= room:
        return list(lengths)
    if len(lengths) == 1:
        return [room]
    first, second = lengths
    short = min(first, second, room // 2)
    long = room - short
    return [long, short] if first > second else [short, long]
