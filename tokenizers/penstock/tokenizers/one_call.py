"""Calls of the `tokenizers` library, with its errors as ours."""

from __future__ import annotations

import tokenizers

from .errors import TokenizerError


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
