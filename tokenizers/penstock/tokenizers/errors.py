"""The errors of the tokenizers room, and those of the library made into them. Messages are written for the client or
the operator who caused them."""

from __future__ import annotations

import tokenizers


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


def is_of_the_library(error: BaseException) -> bool:
    """The library has no exception of its own, and where it panics, it raises a BaseException (pyo3's PanicException,
    which cannot be imported)."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def encode_once(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """The library's batch call is used for one text because it is the one that releases the GIL."""
    try:
        encoding = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    except TypeError:
        raise TokenizerError("text is not valid Unicode") from None
    except BaseException as error:
        if not is_of_the_library(error):
            raise
        raise TokenizerError(f"the text cannot be tokenized: {error}") from None
    return list(encoding.ids)
