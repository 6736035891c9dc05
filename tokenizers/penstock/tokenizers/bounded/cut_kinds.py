"""The characters between which texts are cut, in kinds that patterns treat alike.

Cuts are only looked for between characters that every normalization form keeps apart, and of which every version of
Unicode says the same. Letters that fold to more than one character are left out (ß, İ, ŉ). Behind a cut there are no
characters that an accent would change: with one, = becomes ≠ and a letter another letter.
"""

from __future__ import annotations

import string
from collections.abc import Iterable
from dataclasses import dataclass

_FEW = 600


@dataclass(frozen=True)
class Kind:
    chars: str
    """As in a class of a regular expression: `a-zA-Z`."""

    def __contains__(self, char: str) -> bool:
        return any(low <= char <= high for low, high in self._ranges())

    def examples(self, named: Iterable[str]) -> list[str]:
        """All characters; of large ranges, in which all have the same properties, both ends and what is beside the
        characters that a pattern names."""
        found = []
        beside = [chr(ord(char) + step) for char in named for step in (-1, 0, 1) if 0 < ord(char) < 0x10FFFF]
        for low, high in self._ranges():
            if ord(high) - ord(low) < _FEW:
                found += [chr(code) for code in range(ord(low), ord(high) + 1)]
            else:
                found += [low, high, *(char for char in beside if low <= char <= high)]
        return found

    def _ranges(self) -> list[tuple[str, str]]:
        plain = self.chars.removeprefix("\\")
        if len(plain) == 1:
            return [(plain, plain)]
        return [(plain[i], plain[i + 2]) for i in range(0, len(plain), 3)]


SPACE = Kind(" ")
DIGITS = Kind("0-9")
ASCII_LETTERS = Kind("a-zA-Z")
_LETTERS = (
    Kind("À-ÖØ-Þà-öø-þĀ-įĲ-ňŊ-žẠ-ỹ"),  # Latin
    Kind("Α-ΡΣ-Ωά-ία-ώ"),  # Greek
    Kind("А-яё-ѓ"),  # Cyrillic
    Kind("א-ת"),  # Hebrew
    Kind("ؠ-ؿف-ي"),  # Arabic
    Kind("ぁ-ゖァ-ヺ"),  # kana
    Kind("가-힣"),  # Hangul
    Kind("一-龥"),  # Chinese
)
_SIGNS = tuple(
    Kind(char if char.isspace() else "\\" + char) for char in "\n\t" + string.punctuation if char not in "<=>"
)
_CHINESE_SIGNS = tuple(map(Kind, "。，、！？；："))


def left_kinds(*, ascii_only: bool) -> tuple[Kind, ...]:
    return (ASCII_LETTERS, DIGITS) if ascii_only else (ASCII_LETTERS, DIGITS, *_LETTERS)


def right_kinds(*, ascii_only: bool, space_only: bool) -> tuple[Kind, ...]:
    """`space_only`: where a tokenizer would put a space before a text that starts with anything else."""
    if space_only:
        return (SPACE,)
    signs = (SPACE, DIGITS, *_SIGNS)
    return signs if ascii_only else signs + _CHINESE_SIGNS
