"""Formats that write each parameter between tags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from ..parsing import Reading, Tags
from ..parsing.literals import LONGEST_NAME, STRING, Types, parameter_types, quoted, typed_json
from .call_form import Tool
from .stage import ToolCallStage


class ParameterStage(ToolCallStage):
    """Writes arguments as JSON, of the types in the tool's schema. A string is passed on as it comes, and a value of
    another type when it is complete."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__(tools)
        self._types: dict[str, Types] = {}
        self._separator = "{"

    def begin(self, name: str, id: str | None = None) -> None:
        super().begin(name, id)
        tool = self.tools.get(name)
        self._types = parameter_types(tool.parameters) if tool else {}
        self._separator = "{"

    def read_value(self, key: str, ends: Tags, *, on_own_lines: bool = False) -> Reading[None]:
        """Reads a value up to one of the tags, which stays unread. `on_own_lines`: the line break behind the tag before
        it, and the one before the tag behind it, are no part of it."""
        types = self._types.get(key, frozenset())
        if types == STRING:
            self._begin_argument(key, '"')
            trim = _LineBreaks().push if on_own_lines else str
            end = yield from self.reader.before(ends, lambda text: self.arguments(quoted(trim(text))[1:-1]))
            self.arguments('"' if end else "")
            return
        pieces: list[str] = []
        end = yield from self.reader.before(ends, pieces.append)
        if end:
            value = "".join(pieces)
            value = value.removeprefix("\n").removesuffix("\n") if on_own_lines else value
            self._begin_argument(key, typed_json(value, types))

    def end_arguments(self) -> None:
        self.arguments("}" if self._separator == ", " else "{}")

    def _begin_argument(self, key: str, value: str) -> None:
        self.arguments(f"{self._separator}{quoted(key)}: {value}")
        self._separator = ", "


class _LineBreaks:
    """Drops the first line break of a text that has nothing before it, and the last one that has nothing behind it."""

    def __init__(self) -> None:
        self._started = False
        self._held = ""

    def push(self, text: str) -> str:
        if not self._started:
            self._started = True
            text = text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        return text.removesuffix("\n")


_IN_TAG = re.compile(r"[^<>]*")
_TAG_END = Tags(">")


class InvocationStage(ParameterStage):
    """Functions in a section, with parameters in them, as Qwen3-Coder and MiniMax write them.

    `openings`: what begins the section, and what begins a function, up to its name. Models forget the section, so a
    function without one is a call if it names a tool of the request.
    """

    parameter: ClassVar[str]
    """What begins a parameter, up to its name."""
    value_end: ClassVar[str]
    on_own_lines: ClassVar[bool]

    def read_call(self, opening: str) -> Reading[bool]:
        section, function = self.openings
        only_known = opening == function and not self.follows_call
        if opening == section:
            yield from self.reader.skip_space()
            if not (yield from self.reader.one_of(Tags(function))):
                return False
        name = yield from self._read_attribute()
        if not name or (only_known and name not in self.tools):
            return False
        self.begin(name)
        yield from self._read_parameters()
        if not (yield from self.reader.at_end()):
            self.end_arguments()
        return True

    def _read_parameters(self) -> Reading[None]:
        ends = Tags(self.value_end, self.parameter, *self.closings)
        yield from self.reader.skip_space()
        while (yield from self.reader.one_of(Tags(self.parameter))):
            key = yield from self._read_attribute()
            if key:
                yield from self.read_value(key, ends, on_own_lines=self.on_own_lines)
            yield from self.reader.one_of(Tags(self.value_end))
            yield from self.reader.skip_space()

    def _read_attribute(self) -> Reading[str]:
        """A name up to the end of its tag; empty if it is none."""
        name = yield from self.reader.word(_IN_TAG, LONGEST_NAME)
        complete = yield from self.reader.one_of(_TAG_END)
        return name.strip().strip("\"'") if complete else ""


class Qwen3CoderStage(InvocationStage):
    """Qwen3-Coder and Qwen3.5::

        <tool_call>
        <function=NAME>
        <parameter=KEY>
        value
        </parameter>
        </function>
        </tool_call>

    The format is that of the models' chat templates.
    """

    openings = ("<tool_call>", "<function=")
    closings = ("</function>", "</tool_call>")
    parameter = "<parameter="
    value_end = "</parameter>"
    on_own_lines = True


class MiniMaxM2Stage(InvocationStage):
    """MiniMax M2::

        <minimax:tool_call>
        <invoke name="NAME">
        <parameter name="KEY">value</parameter>
        </invoke>
        </minimax:tool_call>

    The format is that of the guide to tool calls that comes with the model.
    """

    openings = ("<minimax:tool_call>", "<invoke name=")
    closings = ("</invoke>", "</minimax:tool_call>")
    parameter = "<parameter name="
    value_end = "</parameter>"
    on_own_lines = False


_KEY = Tags("<arg_key>")
_KEY_END = Tags("</arg_key>")
_VALUE = Tags("<arg_value>")
_VALUE_END = Tags("</arg_value>")


class Glm45Stage(ParameterStage):
    """GLM 4.5 to 4.7::

        <tool_call>NAME
        <arg_key>KEY</arg_key>
        <arg_value>value</arg_value>
        </tool_call>

    The format is that of the models' chat templates.
    """

    openings = ("<tool_call>",)
    inner = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    closings = ("</tool_call>",)

    def read_call(self, opening: str) -> Reading[bool]:
        yield from self.reader.skip_space()
        name = yield from self.read_plain_name()
        yield from self.reader.skip_space()
        key = yield from self.reader.one_of(_KEY)
        if not name or not (key or (yield from self.reader.one_of(Tags(*self.closings)))):
            return False
        self.begin(name)
        while key:
            yield from self._read_argument()
            yield from self.reader.skip_space()
            if (yield from self.reader.at_end()):
                return True
            key = yield from self.reader.one_of(_KEY)
        self.end_arguments()
        return True

    def _read_argument(self) -> Reading[None]:
        """Behind the tag of the key."""
        key = (yield from self.reader.word(_IN_TAG, LONGEST_NAME)).strip()
        yield from self.reader.one_of(_KEY_END)
        yield from self.reader.skip_space()
        if key and (yield from self.reader.one_of(_VALUE)):
            yield from self.read_value(key, _VALUE_END)
            yield from self.reader.one_of(_VALUE_END)
