"""Which tokens only a chat template may write."""

from __future__ import annotations

import re

import tokenizers

_TURN_TAG = re.compile(r"<[|｜].+[|｜]>", re.DOTALL)


def guarded_tokens(backend: tokenizers.Tokenizer, template_source: str) -> dict[str, int]:
    """Text and id of each: the special ones, and of the other added tokens those that the template writes itself or
    that look like a template's (DeepSeek's `<｜User｜>` and Qwen's `<tool_response>` are not special).

    Runs of white space, HTML tags and whatever else a tokenizer has for ordinary text are not among them.
    """
    added = backend.get_added_tokens_decoder()
    return {token.content: i for i, token in sorted(added.items()) if _is_guarded(token, template_source)}


def _is_guarded(token: tokenizers.AddedToken, template_source: str) -> bool:
    text = token.content
    if len(text) < 2 or not text.strip(" \t\r\n▁"):
        return False
    return token.special or text in template_source or _TURN_TAG.fullmatch(text) is not None
