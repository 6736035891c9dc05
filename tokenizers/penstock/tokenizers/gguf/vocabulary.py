"""The list of tokens of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import TokenizerError

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""ggml's numbers for the kinds of tokens (llama.h)."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, and the ids of those with a meaning of their own."""

    texts: list[str]
    ids: dict[str, int]
    """Of all tokens that are used. The first of several with the same text."""
    control: frozenset[int]
    user_defined: frozenset[int]
    """Found in a text before it is split, but no special tokens."""


def read_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Raises TokenizerError."""
    texts = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise TokenizerError("the GGUF file has no tokenizer.ggml.tokens: it holds no vocabulary")
    kinds = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(texts)
    if not isinstance(kinds, list) or len(kinds) != len(texts):
        has = len(kinds) if isinstance(kinds, list) else str(kinds)[:50]
        raise TokenizerError(f"the GGUF file has {len(texts)} tokens, and token_type has {has}")
    ids: dict[str, int] = {}
    for number, (text, kind) in enumerate(zip(texts, kinds, strict=True)):
        if kind != _UNUSED:
            ids.setdefault(text, number)
    known = {number: kind for number, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)}
    return Vocabulary(
        texts,
        ids,
        frozenset(i for i, kind in known.items() if kind == _CONTROL and ids[texts[i]] == i and texts[i]),
        frozenset(i for i, kind in known.items() if kind == _USER_DEFINED and ids[texts[i]] == i and texts[i]),
    )
