"""JSON inside of a text: where a value ends, what a string says, and how a string is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from .reader import Reader, Reading

_BETWEEN = re.compile(r"[ \t\r\n,:0-9A-Za-z+.-]*")
"""What stands between strings and brackets."""
_SCALAR = re.compile(r"[0-9A-Za-z+.-]*")
_IN_STRING = re.compile(r'[^"\\]*')
_CLOSING = {"{": "}", "[": "]"}
_SURROGATE = re.compile("[\ud800-\udfff]")
LONGEST_NAME = 256
"""Of a tool or a parameter, in characters. What is longer is no name, so no more is held back for one."""


def read_value(reader: Reader, pass_on: Callable[[str], object]) -> Reading[bool]:
    """Passes a value on as it is written, piece by piece.

    False if it is cut off, or if something follows that no JSON has outside of strings: a tag for one, or the wrong
    bracket. That stays unread.
    """
    char = yield from reader.peek()
    if char == '"':
        return (yield from _read_quoted(reader, pass_on))
    if char not in _CLOSING:
        scalar = yield from reader.word(_SCALAR, LONGEST_NAME)
        pass_on(scalar)
        return bool(scalar)
    brackets: list[str] = []
    while True:
        if char in _CLOSING:
            brackets.append(_CLOSING[char])
            pass_on(reader.take())
        elif char == brackets[-1]:
            brackets.pop()
            pass_on(reader.take())
            if not brackets:
                return True
        elif char != '"' or not (yield from _read_quoted(reader, pass_on)):
            return False
        yield from reader.run(_BETWEEN, pass_on)
        char = yield from reader.peek()


def read_name(reader: Reader) -> Reading[str | None]:
    """What a short string says: the name of a tool or of a member. None if there is none, or if it is no text."""
    pieces: list[str] = []
    if (yield from reader.peek()) == '"' and (yield from _read_quoted(reader, pieces.append, LONGEST_NAME)):
        return decoded("".join(pieces))
    return None


def _read_quoted(reader: Reader, pass_on: Callable[[str], object], most: int | None = None) -> Reading[bool]:
    """A string with its quotes. False if it is cut off, or if more than `most` characters stand without an escape."""
    pass_on(reader.take())
    while True:
        yield from reader.run(_IN_STRING, pass_on, most)
        char = yield from reader.peek()
        if char == '"':
            pass_on(reader.take())
            return True
        if char != "\\":
            return False
        escape = yield from reader.peek(2)
        pass_on(reader.take(len(escape)))


def decoded(literal: str) -> str | None:
    """What a string's literal says. None if it is none, or says what is not text."""
    try:
        text = json.loads(literal, strict=False)
    except ValueError:
        return None
    return text if isinstance(text, str) and not _SURROGATE.search(text) else None


def quoted(text: str) -> str:
    """The literal of a string."""
    return json.dumps(text, ensure_ascii=_SURROGATE.search(text) is not None)
