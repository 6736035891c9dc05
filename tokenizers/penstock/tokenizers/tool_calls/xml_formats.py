"""Formats that write each parameter between tags."""

from __future__ import annotations

import re
from typing import ClassVar

from ..parsing import Reading, Tags
from ..parsing.json_text import LONGEST_NAME
from .parameters import ParameterStage

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
