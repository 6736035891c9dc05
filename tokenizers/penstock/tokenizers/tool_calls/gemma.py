"""Gemma's calls, which have a notation of their own."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..parsing.literals import quoted
from ..parsing.reader import Reader, Reading, Tags
from .stage import ToolCallStage

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


_CALL = Tags("call:")
_QUOTES = {"<start_function_call>": Tags("<escape>"), "<|tool_call>": Tags('<|"|>')}


class GemmaStage(ToolCallStage):
    """FunctionGemma: `<start_function_call>call:NAME{key:<escape>text<escape>,n:3}<end_function_call>`, and Gemma 4:
    `<|tool_call>call:NAME{key:<|"|>text<|"|>,n:3}<tool_call|>`. Each call is held back until it is complete.

    The formats are those of the models' chat templates and of Google's guide to FunctionGemma.
    """

    openings = ("<start_function_call>", "<|tool_call>")
    inner = ("<escape>", '<|"|>')
    closings = ("<end_function_call>", "<tool_call|>")

    def read_call(self, opening: str) -> Reading[bool]:
        if not (yield from self.reader.one_of(_CALL)):
            return False
        name = yield from self.read_plain_name()
        pieces: list[str] = []
        if not name or not (yield from read_arguments(self.reader, pieces.append, _QUOTES[opening])):
            return False
        self.begin(name)
        self.arguments("".join(pieces))
        return True
