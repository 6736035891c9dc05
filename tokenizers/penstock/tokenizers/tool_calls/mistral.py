"""Mistral's calls, in the form of its older and its newer tokenizers."""

from __future__ import annotations

from ..parsing import Reading, Tags
from .call_form import object_form
from .json_calls import JsonCallStage

_ID = Tags("[CALL_ID]")
_ARGUMENTS = Tags("[ARGS]")


class MistralStage(JsonCallStage):
    """Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` up to version 7 of the tokenizer. From version 11 on
    `[TOOL_CALLS]NAME[ARGS]{...}` for each call; `[ARGS]` may be missing, and `[CALL_ID]ID` may stand before it.

    The format is that of mistral-common, which renders the prompts of these models.
    """

    openings = ("[TOOL_CALLS]",)
    inner = ("[CALL_ID]", "[ARGS]")
    form = object_form("arguments", tags=openings, before="", behind="", between=", ", begin="[TOOL_CALLS][", end="]")

    def read_call(self, opening: str) -> Reading[bool]:
        yield from self.reader.skip_space()
        name = yield from self.read_plain_name()
        if not name:
            return (yield from self.read_objects())
        id = (yield from self.read_plain_name()) if (yield from self.reader.one_of(_ID)) else None
        yield from self.reader.one_of(_ARGUMENTS)
        return (yield from self.begin_with_object(name, id or None))
