"""Values inside a text, as JSON: JSON itself, Python's literals, and plain text of the types that a schema allows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from .reader import Reader, Reading, Tags

_BETWEEN = re.compile(r"[ \t\r\n,:0-9A-Za-z+.-]*")
"""What stands between strings and brackets."""
_SCALAR = re.compile(r"[0-9A-Za-z+.-]*")
_IN_STRING = re.compile(r'[^"\\]*')
_CLOSING_BRACKETS = {"{": "}", "[": "]"}
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
    if char not in _CLOSING_BRACKETS:
        scalar = yield from reader.word(_SCALAR, LONGEST_NAME)
        pass_on(scalar)
        return bool(scalar)
    brackets: list[str] = []
    while True:
        if char in _CLOSING_BRACKETS:
            brackets.append(_CLOSING_BRACKETS[char])
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


Types = frozenset[str]
"""Types of JSON schema. Empty: not known."""
STRING: Types = frozenset({"string"})
_DEEPEST_VALUE = 8
"""Alternatives within alternatives of a schema. The client writes the schemas."""
_PYTHON_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),  # before int: True is one
    (int, "integer"),
    (float, "number"),
    (str, "string"),
    (list, "array"),
    (dict, "object"),
    (type(None), "null"),
)
_NAMES = frozenset(name for _, name in _PYTHON_TYPES)
_UNKNOWN: Types = frozenset()


def parameter_types(parameters: Mapping[str, Any] | None) -> dict[str, Types]:
    """The types of each parameter of a tool. Where a schema is not as it should be, they are not known."""
    properties = parameters.get("properties") if parameters is not None else None
    if not isinstance(properties, Mapping):
        return {}
    return {str(name): _types(schema, 0) for name, schema in properties.items()}


def _types(schema: object, depth: int) -> Types:
    if not isinstance(schema, Mapping) or depth > _DEEPEST_VALUE:
        return _UNKNOWN
    named = schema.get("type")
    if named is not None:
        names = frozenset(map(str, named if isinstance(named, list) else [named]))
        return names if names <= _NAMES else _UNKNOWN
    if isinstance(schema.get("enum"), list):
        return frozenset(_type_of(value) for value in schema["enum"])
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            alternatives = [_types(alternative, depth + 1) for alternative in schema[key]]
            return frozenset[str]().union(*alternatives) if all(alternatives) else _UNKNOWN
    return _UNKNOWN


def typed_json(text: str, types: Types) -> str:
    """JSON for `text`: as it is if that is JSON of one of the types, or a Python literal of one; else a string."""
    if types != STRING:
        for read in (str.strip, _from_python):
            json_text = read(text)
            if _fits(_json_type(json_text), types):
                return json_text
    return quoted(text)


def _fits(kind: str, types: Types) -> bool:
    """Strings are written without quotes, so what is JSON of a string is a string with quotes in it."""
    if kind in ("", "string"):
        return False
    return not types or kind in types or (kind == "integer" and "number" in types)


def _json_type(text: str) -> str:
    """Empty if it is no JSON."""
    try:
        return _type_of(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return ""


def _refuse(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")


def _type_of(value: object) -> str:
    return next((name for kind, name in _PYTHON_TYPES if isinstance(value, kind)), "")


def _from_python(text: str) -> str:
    """The JSON of a Python literal, for what is written as `{'a': True}`; empty if the text is none."""
    reader, pieces = Reader(), list[str]()
    reader.feed(text)
    reader.end()
    reading = read_literal(reader, pieces.append)
    try:
        next(reading)
    except StopIteration as stop:
        return "".join(pieces) if stop.value and not reader.rest().strip() else ""
    return ""
