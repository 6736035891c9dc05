"""Which tokens only a chat template may write."""

from __future__ import annotations

import re
from collections.abc import Collection

import tokenizers

_TURN_TAG = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)


def guarded_tokens(
    backend: tokenizers.Tokenizer, template_source: str, own_tags: Collection[str] = ()
) -> dict[str, int]:
    """Text and id of each: the special ones, and of the other added tokens those that the template writes itself, that
    look like a template's, or that the model writes as tags (DeepSeek's `<｜User｜>` and Qwen's `<think>` are such).

    Runs of white space, HTML tags and whatever else a tokenizer has for ordinary text are not among them.
    """
    added = backend.get_added_tokens_decoder()
    return {token.content: i for i, token in sorted(added.items()) if _is_guarded(token, template_source, own_tags)}


def _is_guarded(token: tokenizers.AddedToken, template_source: str, own_tags: Collection[str]) -> bool:
    text = token.content
    if len(text) < 2 or not text.strip(" \t\r\n▁"):
        return False
    return token.special or text in own_tags or text in template_source or _TURN_TAG.fullmatch(text) is not None
