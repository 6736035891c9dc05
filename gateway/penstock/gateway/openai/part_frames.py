"""Token streams of chat choices that have reasoning, tool calls and the like beside text."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.gateway.llm.dataplane import ChoiceDelta
from penstock.gateway.openai.frames import Frames
from penstock.gateway.openai.message_parts import finish_reason, has_call, message_delta
from penstock.tokenizers import TextPart, ToolCallPart

_encode = msgspec.json.Encoder().encode
_RUNNING: dict[str, object] = {"logprobs": None, "finish_reason": None}
_NOTHING = TextPart("")


class PartFrames(Frames):
    """Each part has a chunk of its own, so that their order is kept. The last chunk of a delta has what belongs to all
    of it: finish reason, logprobs, token ids. Where a call ends the answer, that is one more chunk: OpenAI's client
    looks at the finish reason before it looks at the call, and would not tell that the call is complete."""

    _with_calls: frozenset[int] = frozenset()
    """Choices that have called a tool."""
    reports_calls = True
    """Such a choice ends with `tool_calls`."""

    def render(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        return b"".join([chunk for delta in deltas for chunk in self._chunks(delta)])

    def _chunks(self, delta: ChoiceDelta) -> list[bytes]:
        index, parts = delta.index, delta.parts or (_NOTHING,)
        if delta.finish_reason is not None and isinstance(parts[-1], ToolCallPart):
            parts = (*parts, _NOTHING)
        if has_call(parts):
            self._with_calls |= {index}
        fields = self._fields(delta)
        fields["finish_reason"] = finish_reason(
            delta.finish_reason, called=self.reports_calls and index in self._with_calls
        )
        *before, last = [_encode(message_delta(part)) for part in parts]
        return [*(self._chunk(index, part, _RUNNING) for part in before), self._chunk(index, last, fields)]


class NamedCallFrames(PartFrames):
    """Where the request has named the tool, a choice that has called it has stopped, as at OpenAI."""

    reports_calls = False
