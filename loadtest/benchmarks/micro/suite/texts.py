"""Texts for the benchmarks, and the tokenizer of the built-in demo model."""

from __future__ import annotations

import random
from collections.abc import Sequence

from penstock.gateway.models.language.models import find_model
from penstock.tokenizers import Tokenizer

_WORDS = ("the", "steam", "engine", "turns", "water", "into", "motion", "while", "rivers", "carry", "boats", "town,")
_CJK = "蒸汽机把水变成运动每个阀门都开得很晚而河流载着船只驶向城镇"
_EMOJI = "😀🚂🌊⚙️🏙️👩‍🔬🔥🛶"


def demo_tokenizer() -> Tokenizer:
    return Tokenizer(find_model(None).folder)


def text(kind: str, length: int) -> str:
    """About `length` characters of `ascii`, `cjk` or `emoji`, always the same."""
    pieces: dict[str, tuple[Sequence[str], str]] = {"ascii": (_WORDS, " "), "cjk": (_CJK, ""), "emoji": (_EMOJI, "")}
    choices, gap = pieces[kind]
    rng = random.Random(length)
    words = ""
    while len(words) < length:
        words += rng.choice(choices) + gap
    return words[:length]
