"""Deltas as server-sent events.

Nearly all of a chunk is the same from token to token. So each choice has these bytes ready, and only the JSON of the
new text is put between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.gateway.apis.openai.objects import (
    FUNCTIONS,
    CallForms,
    ResponseHead,
    UsageObject,
    custom_delta,
    finish_reason,
    has_call,
    input_delta,
    message_delta,
    older_delta,
)
from penstock.gateway.generating.streams import COMMENT
from penstock.gateway.models.language.dataplane import ChoiceDelta
from penstock.tokenizers import Part, TextPart, ToolCallPart

_encode = msgspec.json.Encoder().encode
_DONE = b"data: [DONE]\n\n"
_RUNNING = b',"logprobs":null,"finish_reason":null}]'

LogprobsFormat = Callable[[int, Sequence[Any]], object]


class Frames:
    """Renders the deltas of one call.

    `opening` and `closing` stand around the text inside a choice: `"text":` and nothing, or `"delta":{"content":`
    and `}`. `logprobs`, `extra` and `usage` give more fields for a choice's delta, for the choice, and for the chunk.
    """

    heartbeat = COMMENT

    def __init__(
        self,
        head: ResponseHead,
        choices: int,
        *,
        opening: bytes,
        closing: bytes = b"",
        logprobs: LogprobsFormat | None = None,
        extra: Callable[[ChoiceDelta], Mapping[str, object]] | None = None,
        usage: Callable[[int | None], object] | None = None,
        announce_usage: bool = False,
    ) -> None:
        """`announce_usage`: the usage comes in a last chunk, and each chunk before it says `null`, as OpenAI's do."""
        self._start = b"data: " + _encode(head)[:-1]
        choice = self._start + b',"choices":[{"index":'
        self._prefixes = [choice + b"%d," % index + opening for index in range(choices)]
        self._closing = closing
        self._no_usage = b',"usage":null' if announce_usage else b""
        self._suffix = closing + _RUNNING + self._no_usage + b"}\n\n"
        self._logprobs = logprobs
        self._extra = extra
        self._usage = usage
        self._plain = logprobs is None and extra is None and usage is None
        self.live = choices
        """Choices whose finish reason has not been rendered."""

    def render(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        """The frames of these deltas; empty if they have nothing to show."""
        parts: list[bytes] = []
        for delta in deltas:
            if delta.finish_reason is None and self._plain:
                if delta.text:
                    parts += (self._prefixes[delta.index], _encode(delta.text), self._suffix)
            elif delta.text or delta.token_ids or delta.logprobs or delta.finish_reason:
                parts.append(self._chunk(delta.index, _encode(delta.text), self._fields(delta)))
        return b"".join(parts)

    def _fields(self, delta: ChoiceDelta) -> dict[str, object]:
        """What a choice's chunk has beside its text: finish reason, logprobs, token ids. Called once for each delta."""
        logprobs: object = None
        if self._logprobs is not None and delta.logprobs:
            logprobs = self._logprobs(delta.index, delta.logprobs)
        fields: dict[str, object] = {"logprobs": logprobs, "finish_reason": delta.finish_reason}
        if delta.finish_reason is not None:
            self.live -= 1
            fields["stop_reason"] = delta.stop_reason
        if self._extra is not None:
            fields.update(self._extra(delta))
        return fields

    def _chunk(self, index: int, shown: bytes, fields: Mapping[str, object]) -> bytes:
        parts = (self._prefixes[index], shown, self._closing, b",", _encode(fields)[1:], b"]")
        return b"".join(parts) + self._tail(index)

    def role(self, index: int, prompt_token_ids: list[int] | None) -> bytes:
        """The chunk that opens a chat choice."""
        fields = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
        extra = b"" if prompt_token_ids is None else b',"prompt_token_ids":' + _encode(prompt_token_ids)
        return self._start + extra + b',"choices":[' + fields % index + b"]" + self._tail(None)

    def text(self, index: int, text: str) -> bytes:
        """A chunk with this text, before the first delta of a chat choice."""
        fields = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (index, _encode(text))
        return self._start + b',"choices":[' + fields + b"]" + self._tail(None)

    def _tail(self, index: int | None) -> bytes:
        if self._usage is None:
            return self._no_usage + b"}\n\n"
        return b',"usage":' + _encode(self._usage(index)) + b"}\n\n"

    def end(self, usage: UsageObject | None) -> bytes:
        """The usage chunk, if asked for, and `[DONE]`."""
        if usage is None:
            return _DONE
        return self._start + b',"choices":[],"usage":' + _encode(usage) + b"}\n\n" + _DONE


_BARE: dict[str, object] = {"logprobs": None, "finish_reason": None}
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
        *before, last = [_encode(chunk) for chunk in self._shown(index, parts, ended=delta.finish_reason is not None)]
        return [*(self._chunk(index, part, _BARE) for part in before), self._chunk(index, last, fields)]

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
