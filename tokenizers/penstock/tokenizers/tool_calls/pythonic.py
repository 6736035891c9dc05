"""Calls written as a Python list: `[weather(city="Oslo"), clock()]`."""

from __future__ import annotations

import re

from ..parsing import Reading, Tags
from ..parsing.literals import LONGEST_NAME, quoted, read_literal
from .stage import ToolCallStage

_NAME = re.compile(r"[\w.-]*")
_AFTER_CALL = Tags(",", "]")
_COMMA = Tags(",")
_PARENTHESIS = Tags("(")
_EQUALS = Tags("=")


class PythonicStage(ToolCallStage):
    """Llama 4, ToolACE, Olmo 3 and others: a list of calls with keyword arguments, at the start of the text.
    `<|python_start|>` and `<|python_end|>` may enclose it.

    The format is that of Meta's prompt format for Llama 4. Without the tag it is a list of calls only if the first one
    names a tool of the request. Each call is held back until it is complete.
    """

    openings = ("<|python_start|>",)
    closings = ("<|python_end|>",)

    def read_untagged_call(self) -> Reading[bool]:
        yield from self.pass_space()
        return (yield from self._read_list(only_known=True))

    def read_call(self, opening: str) -> Reading[bool]:
        yield from self.reader.skip_space()
        return (yield from self._read_list(only_known=False))

    def _read_list(self, only_known: bool) -> Reading[bool]:
        if (yield from self.reader.peek()) != "[":
            return False
        self.reader.take()
        while True:
            yield from self.reader.skip_space()
            name = yield from self.read_plain_name()
            if not name or (only_known and name not in self.tools):
                return False
            pieces: list[str] = []
            if not (yield from self._read_arguments(pieces)):
                return False
            self.begin(name)
            self.arguments("{" + "".join(pieces) + "}")
            only_known = False
            self.reader.record()
            yield from self.reader.skip_space()
            if (yield from self.reader.one_of(_AFTER_CALL)) != ",":
                return True

    def _read_arguments(self, pieces: list[str]) -> Reading[bool]:
        if not (yield from self.reader.one_of(_PARENTHESIS)):
            return False
        separator = ""
        while True:
            yield from self.reader.skip_space()
            if (yield from self.reader.peek()) == ")":
                self.reader.take()
                return True
            pieces.append(separator)
            if not (yield from self._read_argument(pieces)):
                return False
            separator = ", "
            yield from self.reader.skip_space()
            if not (yield from self.reader.one_of(_COMMA)) and (yield from self.reader.peek()) != ")":
                return False

    def _read_argument(self, pieces: list[str]) -> Reading[bool]:
        key = yield from self.reader.word(_NAME, LONGEST_NAME)
        yield from self.reader.skip_space()
        if not key or not (yield from self.reader.one_of(_EQUALS)):
            return False
        pieces.append(f"{quoted(key)}: ")
        return (yield from read_literal(self.reader, pieces.append))
