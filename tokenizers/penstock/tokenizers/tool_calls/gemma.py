"""Gemma's calls, which have a notation of their own."""

from __future__ import annotations

from ..parsing import Reading, Tags
from ..parsing.gemma_text import read_arguments
from .stage import ToolCallStage

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
