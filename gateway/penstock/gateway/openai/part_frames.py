"""Token streams of chat choices that have reasoning, tool calls and the like beside text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.gateway.llm.dataplane import ChoiceDelta
from penstock.gateway.openai.frames import Frames
from penstock.gateway.openai.objects import (
    FUNCTIONS,
    CallForms,
    custom_delta,
    finish_reason,
    has_call,
    input_delta,
    message_delta,
    older_delta,
)
from penstock.tokenizers import Part, TextPart, ToolCallPart

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
    forms: CallForms = FUNCTIONS

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
            delta.finish_reason, called=self.reports_calls and index in self._with_calls, forms=self.forms
        )
        *before, last = [_encode(each) for each in self._shown(index, parts, ended=delta.finish_reason is not None)]
        return [*(self._chunk(index, part, _RUNNING) for part in before), self._chunk(index, last, fields)]

    def _shown(self, index: int, parts: Sequence[Part], *, ended: bool) -> Sequence[dict[str, object]]:
        """The `delta`s of a choice's parts; at least one. `ended`: these are its last."""
        return [message_delta(part) for part in parts]


class NamedCallFrames(PartFrames):
    """Where the request has named the tool, a choice that has called it has stopped, as at OpenAI."""

    reports_calls = False


class FormedCallFrames(PartFrames):
    """For a request with custom tools, or with functions in the older form. The text of a custom tool's call comes in
    one piece when the model has written all of it: it is the value of an argument, in JSON."""

    def __init__(self, *args: Any, forms: CallForms, reports_calls: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.forms, self.reports_calls = forms, reports_calls
        self._open: dict[int, tuple[int, list[str]]] = {}
        """By choice, the custom call that it is writing: its number, and its arguments so far."""

    def _shown(self, index: int, parts: Sequence[Part], *, ended: bool) -> Sequence[dict[str, object]]:
        shown: list[dict[str, object]] = []
        for part in parts:
            if index in self._open and isinstance(part, ToolCallPart) and part.name is None:
                self._open[index][1].append(part.arguments)
            elif part is not _NOTHING or ended:  # else a parser holds something back
                shown += [*self._completed(index), self._begun(index, part)]
        if ended:
            shown += self._completed(index)
        return shown or [message_delta(_NOTHING)]

    def _begun(self, index: int, part: Part) -> dict[str, object]:
        if not isinstance(part, ToolCallPart):
            return message_delta(part)
        if part.name in self.forms.custom:
            self._open[index] = part.index, [part.arguments]
            return custom_delta(part)
        return older_delta(part) if self.forms.older else message_delta(part)

    def _completed(self, index: int) -> list[dict[str, object]]:
        if index not in self._open:
            return []
        number, pieces = self._open.pop(index)
        return [input_delta(number, "".join(pieces))]
