"""Errors of the chat front in the words of this API: a caller has to find the field in its own request."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.engines.errors import PenstockError
from penstock.gateway.front.record import RequestRecord

_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "verbosity": "text.verbosity",
}
_CHAT_NAME = re.compile(rf"\b({'|'.join(sorted(_NAMES, reverse=True))})\b|(?<=\])\.function\b")
"""The fields, and what a tool's own fields are in there: `tools[0].function.name`."""


@contextmanager
def in_words_of_responses(record: RequestRecord) -> Iterator[None]:
    """Raises what is raised inside, and renames what is noted as ignored there."""
    before = len(record.ignored)
    try:
        yield
        if len(record.ignored) > before:
            record.ignored = (*record.ignored[:before], *map(_renamed, record.ignored[before:]))
    except PenstockError as error:
        if error.param is not None and error.param != _renamed(error.param):
            error.message, error.param = _renamed(error.message), _renamed(error.param)
        raise


def name_of_responses(field: str | None) -> str | None:
    """A chat's field as it is called here."""
    return None if field is None else _renamed(field)


def _renamed(text: str) -> str:
    return _CHAT_NAME.sub(lambda found: _NAMES.get(found[0], ""), text)
