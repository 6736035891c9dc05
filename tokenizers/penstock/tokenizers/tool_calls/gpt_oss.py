"""The calls of gpt-oss, which are messages to a function."""

from __future__ import annotations

from ..parsing import Reading
from ..parsing.harmony import CLOSINGS, MARKERS, OPENINGS, START, Header, read_header
from .stage import ToolCallStage

_FUNCTION = "functions."


class GptOssStage(ToolCallStage):
    """gpt-oss: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`, where the recipient
    may also stand before the channel. All other messages stay as they are, with their tokens: the reasoning parser of
    the same name is for them, and it runs first.

    The format is OpenAI's harmony response format.
    """

    openings = OPENINGS
    inner = MARKERS[2:4]
    closings = CLOSINGS

    def read_untagged_call(self) -> Reading[bool]:
        self.reader.record()
        opening = yield from self.reader.one_of(START)
        return opening is not None and (yield from self.read_call(opening))

    def read_call(self, opening: str) -> Reading[bool]:
        header = yield from read_header(self.reader, opening)
        name = self._called(header) if header else ""
        return bool(name) and (yield from self.begin_with_object(name))

    def _called(self, header: Header) -> str:
        """The tool; empty if the message is to none. Names without the prefix may also be those of built-in tools."""
        recipient = header.recipient or ""
        if recipient.startswith(_FUNCTION):
            return recipient.removeprefix(_FUNCTION)
        return recipient if recipient in self.tools else ""
