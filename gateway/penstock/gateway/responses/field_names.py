"""Errors of the chat front in the words of this API: a caller has to find the field in its own request."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
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
_TOOL = re.compile(r"\btools\[[0-9]+\]")


@contextmanager
def in_words_of_responses(record: RequestRecord, places: Sequence[str] = ()) -> Iterator[None]:
    """Raises what is raised inside, and renames what is noted as ignored there. `places`: of each of the chat's tools,
    where it stands in the request."""

    names = {f"tools[{number}]": place for number, place in enumerate(places)}

    def renamed(text: str) -> str:
        return _TOOL.sub(lambda found: names.get(found[0], found[0]), _renamed(text))

    before = len(record.ignored)
    try:
        yield
        if len(record.ignored) > before:
            record.ignored = (*record.ignored[:before], *map(_renamed, record.ignored[before:]))
    except PenstockError as error:
        if error.param is not None and error.param != renamed(error.param):
            error.message, error.param = renamed(error.message), renamed(error.param)
        raise


def name_of_responses(field: str | None) -> str | None:
    """A chat's field as it is called here."""
    return None if field is None else _renamed(field)


def _renamed(text: str) -> str:
    return _CHAT_NAME.sub(lambda found: _NAMES.get(found[0], ""), text)
