"""Formats that put each call between tokens of its own: a name, then the arguments as JSON."""

from __future__ import annotations

from typing import ClassVar

from ..parsing import Reading, Tags
from .stage import ToolCallStage

_FENCE = Tags("```json")


class SectionStage(ToolCallStage):
    """`openings`: what begins the section of all calls, which may be missing, and what begins one call. `inner`: what
    stands behind the name."""

    def read_call(self, opening: str) -> Reading[bool]:
        section, call = self.openings
        if opening == section:
            yield from self.reader.skip_space()
            if not (yield from self.reader.one_of(Tags(call))):
                return False
        name, id = yield from self.read_head()
        return bool(name) and (yield from self.begin_with_object(name, id))

    def read_head(self) -> Reading[tuple[str, str | None]]:
        """The name, empty if this is no call, and the id. Reads up to the arguments."""
        yield from self.reader.skip_space()
        name = yield from self.read_plain_name()
        yield from self.reader.skip_space()
        follows = yield from self.reader.one_of(Tags(*self.inner))
        return (name if follows else ""), None


class DeepSeekV31Stage(SectionStage):
    """DeepSeek V3.1: `<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`, in a section.

    The format is that of the model's chat template and of the section on tool calls in its model card.
    """

    openings = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    inner = ("<｜tool▁sep｜>",)
    closings: ClassVar[tuple[str, ...]] = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")


class DeepSeekV3Stage(DeepSeekV31Stage):
    """DeepSeek V3 and R1: like V3.1, but the name stands behind the tool's type, and the arguments in a block of code::

        <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME
        ```json
        {...}
        ```<｜tool▁call▁end｜>

    The format is that of the models' chat templates.
    """

    closings = ("```", *DeepSeekV31Stage.closings)

    def read_head(self) -> Reading[tuple[str, str | None]]:
        tool_type, _ = yield from super().read_head()
        name = yield from self.read_plain_name()
        yield from self.reader.skip_space()
        yield from self.reader.one_of(_FENCE)
        return (name if tool_type else ""), None


class KimiK2Stage(SectionStage):
    """Kimi K2: `<|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{...}<|tool_call_end|>`, in a section.
    What stands before the arguments is the call's id, and the model expects it back with the tool's answer.

    The format is that of the guide to tool calls that comes with the model.
    """

    openings = ("<|tool_calls_section_begin|>", "<|tool_call_begin|>")
    inner = ("<|tool_call_argument_begin|>",)
    closings = ("<|tool_call_end|>", "<|tool_calls_section_end|>")

    def read_head(self) -> Reading[tuple[str, str | None]]:
        id, _ = yield from super().read_head()
        name = id.removeprefix("functions.")
        before, colon, number = name.rpartition(":")
        return (before if colon and number.isdecimal() else name), id
