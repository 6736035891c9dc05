"""The list of tokens of a GGUF file, and which of them end an answer.

GGUF files name one end token or two; all others are known by their texts. The rule is that of llama.cpp, in
src/llama-vocab.cpp, but for </s>: where it is no control token, as in Gemma's vocabulary, it is a tag of HTML.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import TokenizerError

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""ggml's numbers for the kinds of tokens (llama.h)."""
_END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Tokens that end an answer, by the metadata's names. Behind those of fill-in-the-middle another file would begin."""
_END_TEXTS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
        *("<end_of_turn>", "<turn|>", "<eos>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<end_of_utterance>"),
        *("<|return|>", "<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "[e~["),
        "<｜end▁of▁sentence｜>",
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
    )
)
_END_OR_TAG = "</s>"
_NO_ENDS = (
    (frozenset(("<|return|>", "<|call|>")), "<|end|>"),
    (frozenset(("<|return|>", "<|calls|>")), "<|end|>"),
    (frozenset(("<|flush|>", "<|call|>")), "<|end|>"),
    (frozenset(("<|flush|>", "<|calls|>")), "<|end|>"),
    (frozenset(("<|tool_response>",)), _END_OR_TAG),
)
"""Where a file has all of the former, the latter only ends a part of an answer (gpt-oss: a channel)."""


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id, and the ids of those with a meaning of their own."""

    texts: list[str]
    ids: dict[str, int]
    """Of all tokens that are used. The first of several with the same text."""
    control: frozenset[int]
    user_defined: frozenset[int]
    """Found in a text before it is split, but no special tokens."""
    ends: frozenset[int]
    """An answer is complete with any of these."""


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
    by_text = {ids[text] for text in _END_TEXTS & ids.keys()}
    known = {number: kind for number, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)}
    if known.get(ids.get(_END_OR_TAG, -1)) == _CONTROL:
        by_text.add(ids[_END_OR_TAG])
    # Some converters write these as words: no text of a template would become one of them.
    known |= dict.fromkeys(by_text, _CONTROL)
    return Vocabulary(
        texts,
        ids,
        frozenset(i for i, kind in known.items() if kind == _CONTROL and ids[texts[i]] == i and texts[i]),
        frozenset(i for i, kind in known.items() if kind == _USER_DEFINED and ids[texts[i]] == i and texts[i]),
        frozenset((*by_text, *_named_ends(metadata, len(texts)))) - {ids[text] for text in _no_ends(ids)},
    )


def _named_ends(metadata: Mapping[str, Any], count: int) -> Iterator[int]:
    for role in _END_ROLES:
        token_id = metadata.get(f"tokenizer.ggml.{role}_token_id")
        if type(token_id) is int and 0 <= token_id < count:
            yield token_id


def _no_ends(ids: Mapping[str, int]) -> Iterator[str]:
    return (text for others, text in _NO_ENDS if text in ids and others <= ids.keys())
