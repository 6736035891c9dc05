"""What the tokenizers room raises. Messages are written for the client or the operator who caused them."""

from __future__ import annotations


class TokenizerError(ValueError):
    """A tokenizer folder that cannot be loaded, or text and ids that cannot be converted."""


class PromptTooLong(TokenizerError):
    """A text with more than `limit` tokens, noticed before all of them were counted."""

    def __init__(self, limit: int, *, certain: bool = True) -> None:
        """`certain`: the tokens were counted, or cannot be fewer. Else the text is longer than so many are expected to
        be."""
        super().__init__(f"the text has {'' if certain else 'probably '}more than {limit} tokens")
        self.limit = limit
        self.certain = certain


class ChatTemplateError(ValueError):
    """The chat template refused the messages, failed on them, or exceeded its bounds."""


class ChatTemplateTimeout(ChatTemplateError):
    """The chat template did not finish within its time limit."""
