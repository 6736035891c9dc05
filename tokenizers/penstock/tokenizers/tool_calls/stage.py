"""The base of all parsers of tool calls: text, and calls that begin with a tag."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from ..parsing import ParserStage, Reading, Tags
from ..parsing.literals import LONGEST_NAME, decoded, read_value
from ..parsing.reader import SPACE
from .call_form import CallForm, Tool

_NAME = re.compile(r"[^\s<>{}\[\]()\"'`,;=|｜]*")


class ToolCallStage(ParserStage):
    """A subclass says which tags begin a call, and reads one.

    What has been read from the tag on becomes text again, exactly as written, if it turns out to be no call. As soon as
    `begin` has been called it is one, and what it has told of its arguments stays, even if it is cut off. White space
    between calls and behind the last one is dropped, and so is a closing of which the end is missing.
    """

    openings: ClassVar[tuple[str, ...]] = ()
    """What begins a call. It is read before `read_call`."""
    closings: ClassVar[tuple[str, ...]] = ()
    """What may stand behind a call and means nothing."""
    inner: ClassVar[tuple[str, ...]] = ()
    """What stands inside of calls and may be special tokens."""
    separators: ClassVar[tuple[str, ...]] = ()
    """What begins a call as well, but only right behind another one."""
    form: ClassVar[CallForm | None] = None
    """How a grammar makes models write calls in this format; None: it cannot."""
    _openings: ClassVar[Tags]
    _behind_call: ClassVar[Tags]
    _closings: ClassVar[Tags | None] = None

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        super().__init__()
        self.tools = {tool.name: tool for tool in tools}
        self.follows_call = False
        """Whether the opening stands right behind another call."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.markers = (*cls.openings, *cls.inner, *cls.closings)
        if cls.openings:
            cls._openings = Tags(*cls.openings)
            cls._behind_call = Tags(*cls.openings, *cls.separators, *cls.closings)
        if cls.closings:
            cls._closings = Tags(*cls.closings)

    @abstractmethod
    def read_call(self, opening: str) -> Reading[bool]:
        """Reads a call, or several. False: what was read since the last one began is no call."""

    def read_untagged_call(self) -> Reading[bool]:
        """Reads a call at the start of the text, where a format has calls without a tag."""
        yield from ()
        return False

    def parse(self) -> Reading[None]:
        called = yield from self.read_untagged_call()
        while True:
            opening = (yield from self._next_opening()) if called else None
            self.follows_call = opening is not None
            if opening is None:
                if called and ((yield from self.reader.at_end()) or self._closing_is_cut_off()):
                    return
                self.text(self.reader.recorded())
                opening = yield from self.reader.until(self._openings, self.text)
                if opening is None:
                    return
                self.reader.record(opening)
            called = yield from self.read_call(opening)

    def _closing_is_cut_off(self) -> bool:
        return self._closings is not None and self.reader.ends_within(self._closings)

    def _next_opening(self) -> Reading[str | None]:
        """What is read from behind the last closing on stays recorded."""
        while True:
            self.reader.record()
            yield from self.reader.skip_space()
            tag = yield from self.reader.one_of(self._behind_call)
            if tag not in self.closings:
                return tag

    def begin(self, name: str, id: str | None = None) -> None:
        """What has been read is a call of this tool."""
        self.reader.forget()
        self.call(name, id)

    def pass_space(self) -> Reading[None]:
        """Passes on white space in front of what may be a call at the start of the text."""
        self.reader.forget()
        yield from self.reader.run(SPACE, self.text)
        self.reader.record()

    def read_plain_name(self) -> Reading[str]:
        """A name without quotes; empty if there is none."""
        return (yield from self.reader.word(_NAME, LONGEST_NAME))

    def begin_with_object(self, name: str, id: str | None = None) -> Reading[bool]:
        """Begins a call if its arguments follow as an object, or if it ends here and has none. False otherwise."""
        yield from self.reader.skip_space()
        if (yield from self.reader.peek()) == "{":
            self.begin(name, id)
            yield from read_value(self.reader, self.arguments)
            return True
        if not self.closings or not (yield from self.reader.one_of(Tags(*self.closings))):
            return False
        self.begin(name, id)
        self.arguments("{}")
        return True

    def read_json_arguments(self) -> Reading[bool]:
        """An object, which is passed on as it comes, or what `plain_arguments` knows. False if it is cut off."""
        if (yield from self.reader.peek()) == "{":
            return (yield from read_value(self.reader, self.arguments))
        pieces: list[str] = []
        complete = yield from read_value(self.reader, pieces.append)
        self.arguments(plain_arguments("".join(pieces)))
        return complete


def plain_arguments(written: str) -> str:
    """Arguments as an object, where a model has written a string with the object's JSON in it, or null for none."""
    if written == "null":
        return "{}"
    inner = decoded(written) if written.startswith('"') else None
    return inner if inner is not None and inner.lstrip().startswith("{") else written
