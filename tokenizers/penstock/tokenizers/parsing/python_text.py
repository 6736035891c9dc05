"""Python's literals inside of a text, as JSON."""

from __future__ import annotations

import re
from collections.abc import Callable

from .json_text import quoted
from .reader import Reader, Reading
from .tags import Tags

_WORD = re.compile(r"[\w.+-]*")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LONGEST_WORD = 256
_DEEPEST = 32
"""Brackets within brackets. More are no arguments, and each costs a frame of Python's stack."""
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_COMMA = Tags(",")
_COLON = Tags(":")
_ENDS = {quote: Tags(quote, "\\") for quote in ('"', "'", '"""', "'''")}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "0": "\0", "\n": ""}
_CODES = {"x": 2, "u": 4, "U": 8}
"""Escapes with so many hexadecimal digits."""
_HEX = re.compile(r"[0-9a-fA-F]*")

Write = Callable[[str], object]


def read_literal(reader: Reader, write: Write, depth: int = 0) -> Reading[bool]:
    """Writes a literal as JSON: a string, number, True, False, None, list, tuple, or a dictionary with strings as keys.
    Also JSON's own words. False if there is none; then only a part may have been read and written."""
    yield from reader.skip_space()
    char = yield from reader.peek()
    if char in ("'", '"'):
        return (yield from _read_string(reader, write))
    if char in _CLOSING:
        return depth < _DEEPEST and (yield from _read_container(reader, write, depth + 1))
    word = yield from reader.word(_WORD, _LONGEST_WORD)
    if not _NUMBER.fullmatch(word):
        word = _WORDS.get(word, "")
    write(word)
    return bool(word)


def _read_container(reader: Reader, write: Write, depth: int) -> Reading[bool]:
    bracket = reader.take()
    closing = _CLOSING[bracket]
    write("{" if bracket == "{" else "[")
    separator = ""
    while True:
        yield from reader.skip_space()
        if (yield from reader.peek()) == closing:
            reader.take()
            write("}" if bracket == "{" else "]")
            return True
        write(separator)
        if bracket == "{" and not (yield from _read_key(reader, write)):
            return False
        if not (yield from read_literal(reader, write, depth)):
            return False
        separator = ", "
        yield from reader.skip_space()
        if not (yield from reader.one_of(_COMMA)) and (yield from reader.peek()) != closing:
            return False


def _read_key(reader: Reader, write: Write) -> Reading[bool]:
    if (yield from reader.peek()) not in ("'", '"') or not (yield from _read_string(reader, write)):
        return False
    yield from reader.skip_space()
    write(": ")
    return (yield from reader.one_of(_COLON)) is not None


def _read_string(reader: Reader, write: Write) -> Reading[bool]:
    quote = yield from reader.peek(3)
    if quote != quote[0] * 3:
        quote = quote[0]
    reader.take(len(quote))
    ends = _ENDS[quote]
    write('"')
    while True:
        end = yield from reader.until(ends, lambda text: write(quoted(text)[1:-1]))
        if end == "\\":
            char = yield from _read_escape(reader)
            if char is None:
                return False
            write(quoted(char)[1:-1])
        else:
            write('"')
            return end is not None


def _read_escape(reader: Reader) -> Reading[str | None]:
    """What follows a backslash. One without a meaning stands for itself, as in Python."""
    char = yield from reader.peek()
    if not char:
        return None
    reader.take()
    if char not in _CODES:
        return _ESCAPES.get(char, char if char in "\\'\"" else "\\" + char)
    digits = yield from reader.word(_HEX, _CODES[char])
    code = int(digits, 16) if len(digits) == _CODES[char] else -1
    return chr(code) if 0 <= code <= 0x10FFFF else None
