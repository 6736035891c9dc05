"""Arguments as Gemma writes them, as JSON: `city:<escape>Oslo<escape>,days:3,tags:[<escape>a<escape>]`."""

from __future__ import annotations

import re
from collections.abc import Callable

from .json_text import quoted
from .reader import Reader, Reading
from .tags import Tags

_BARE = re.compile(r"[^,:{}\[\]<]*")
_JSON = re.compile(r"true|false|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LONGEST_BARE = 256
_DEEPEST = 32
_COMMA = Tags(",")
_COLON = Tags(":")
_CLOSING = {"{": "}", "[": "]"}

Write = Callable[[str], object]


def read_arguments(reader: Reader, write: Write, quote: Tags, depth: int = 0) -> Reading[bool]:
    """Writes a bracketed object or list as JSON. `quote` stands before and behind strings, the keys are bare. False if
    there is none; then only a part may have been read and written."""
    bracket = yield from reader.peek()
    if bracket not in _CLOSING or depth == _DEEPEST:
        return False
    closing, separator = _CLOSING[bracket], ""
    write(reader.take())
    while True:
        yield from reader.skip_space()
        if (yield from reader.peek()) == closing:
            write(reader.take())
            return True
        write(separator)
        if bracket == "{" and not (yield from _read_key(reader, write, quote)):
            return False
        if not (yield from _read_value(reader, write, quote, depth)):
            return False
        separator = ", "
        yield from reader.skip_space()
        if not (yield from reader.one_of(_COMMA)) and (yield from reader.peek()) != closing:
            return False


def _read_key(reader: Reader, write: Write, quote: Tags) -> Reading[bool]:
    if (yield from reader.one_of(quote)):
        if not (yield from _read_string(reader, write, quote)):
            return False
    else:
        key = (yield from reader.word(_BARE, _LONGEST_BARE)).strip()
        write(quoted(key))
        if not key:
            return False
    write(": ")
    return (yield from reader.one_of(_COLON)) is not None


def _read_value(reader: Reader, write: Write, quote: Tags, depth: int) -> Reading[bool]:
    yield from reader.skip_space()
    if (yield from reader.one_of(quote)):
        return (yield from _read_string(reader, write, quote))
    if (yield from reader.peek()) in _CLOSING:
        return (yield from read_arguments(reader, write, quote, depth + 1))
    bare = (yield from reader.word(_BARE, _LONGEST_BARE)).strip()
    write(bare if _JSON.fullmatch(bare) else quoted(bare))
    return bool(bare)


def _read_string(reader: Reader, write: Write, quote: Tags) -> Reading[bool]:
    write('"')
    end = yield from reader.until(quote, lambda text: write(quoted(text)[1:-1]))
    write('"')
    return end is not None
