"""What OpenAI's API takes where it takes texts: one, a list of them, or tokens instead."""

from __future__ import annotations

from penstock.engines.errors import InvalidRequestError


def texts_or_ids(
    given: str | list[str | int | list[int]], vocab_size: int, most: int, param: str
) -> list[str | list[int]]:
    """One text or the token ids of one, or a list of at most `most` of these, all of one kind. Raises
    InvalidRequestError."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequestError(f"{param} must not be empty.", param=param)
    texts = [item for item in given if isinstance(item, str)]
    token_ids = [item for item in given if isinstance(item, int)]
    lists = [item for item in given if isinstance(item, list)]
    if len(given) not in (len(texts), len(token_ids), len(lists)):
        raise InvalidRequestError(f"{param} must not mix texts and token ids.", param=param)
    if token_ids:
        lists = [token_ids]
    elif len(given) > most:
        raise InvalidRequestError(f"{param}: at most {most} {param}s are allowed.", param=param)
    if not all(lists):
        raise InvalidRequestError(f"{param} must not be empty.", param=param)
    if any(not 0 <= min(ids) <= max(ids) < vocab_size for ids in lists):
        raise InvalidRequestError(f"{param}: a token id is not in the vocabulary.", param=param)
    return [*texts, *lists]
