"""What the tokenizers room raises. Messages are written for the client or the operator who caused them."""

from __future__ import annotations


class TokenizerError(ValueError):
    """A tokenizer folder that cannot be loaded, or text and ids that cannot be converted."""


class ChatTemplateError(ValueError):
    """The chat template refused the messages, failed on them, or exceeded its bounds."""


class ChatTemplateTimeout(ChatTemplateError):
    """The chat template did not finish within its time limit."""
