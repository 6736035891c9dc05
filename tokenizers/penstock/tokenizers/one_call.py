"""One call of the `tokenizers` library, with its errors as ours."""

from __future__ import annotations

import tokenizers

from .errors import TokenizerError


def encode_once(backend: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """The library's batch call is used for one text because it is the one that releases the GIL."""
    try:
        encoding = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    except TypeError:
        raise TokenizerError("text is not valid Unicode") from None
    except Exception as error:  # the library has no exception of its own
        raise TokenizerError(f"the text cannot be tokenized: {error}") from None
    return list(encoding.ids)
