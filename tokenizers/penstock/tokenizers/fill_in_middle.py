"""Prompts for models that fill in what is missing between two texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class _Format(NamedTuple):
    """What a model family calls its tokens."""

    prefix: str
    suffix: str
    middle: str
    """Empty: the answer follows the prefix, behind which nothing stands."""
    ends: tuple[str, ...] = ()
    """Tokens that end what is filled in, beside EOS."""


_FORMATS = (
    # Qwen2.5-Coder, CodeGemma
    _Format(
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ("<|fim_pad|>", "<|file_sep|>", "<|file_separator|>")
    ),
    # StarCoder, Granite Code
    _Format("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ("<fim_pad>", "<file_sep>")),
    _Format("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ("<fim-pad>",)),  # SantaCoder
    _Format("▁<PRE>", "▁<SUF>", "▁<MID>", ("▁<EOT>",)),  # Code Llama
    _Format("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    _Format("[PREFIX]", "[SUFFIX]", ""),  # Codestral
)


class FillInMiddle(NamedTuple):
    """One model's way to ask for it, in token ids."""

    prefix: int
    suffix: int
    middle: int | None
    ends: frozenset[int]
    begin: tuple[int, ...] = ()
    """What its tokenizer puts before every text."""

    def prompt(self, before: list[int], behind: list[int]) -> list[int]:
        """`before`, `behind`: the texts around what is missing, without special tokens."""
        if self.middle is None:
            return [*self.begin, self.suffix, *behind, self.prefix, *before]
        return [*self.begin, self.prefix, *before, self.suffix, *behind, self.middle]


def find_fill_in_middle(id_of: Callable[[str], int | None], begin: tuple[int, ...]) -> FillInMiddle | None:
    """`id_of`: a token's id by its text, as the vocabulary writes it; `begin`: what stands before every text. None: the
    vocabulary has no such tokens."""
    for one in _FORMATS:
        prefix, suffix, middle = id_of(one.prefix), id_of(one.suffix), id_of(one.middle) if one.middle else None
        if prefix is not None and suffix is not None and (middle is not None or not one.middle):
            ends = frozenset(found for end in one.ends if (found := id_of(end)) is not None)
            return FillInMiddle(prefix, suffix, middle, ends, begin)
    return None
