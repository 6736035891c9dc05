"""The events of a stream: https://docs.anthropic.com/en/docs/build-with-claude/streaming."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.gateway.anthropic.answers import (
    SIGNATURE,
    message_object,
    new_id,
    opened_block,
    stop_fields,
    usage_object,
)
from penstock.gateway.llm.dataplane import ChoiceDelta, Usage
from penstock.tokenizers import Part, ReasoningPart, TextPart, ToolCallPart

_encode = msgspec.json.Encoder().encode
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_END = b"}}\n\n"
_DELTAS = {"text": ("text_delta", "text"), "thinking": ("thinking_delta", "thinking")}
_DELTAS["tool_use"] = ("input_json_delta", "partial_json")


class MessageEvents:
    """Of one message. One content block is open at a time. Nearly all of a delta's event is the same from token to
    token, so it is made when the block is opened, and only the JSON of what is new is spliced in."""

    heartbeat = _PING

    def __init__(self, model: str, usage: Usage, *, cut: bool = False) -> None:
        """`usage` goes on counting while the events are rendered. `cut`: as of `stop_fields`."""
        self.live = 1
        self._cut = cut
        self._model = model
        self._usage = usage
        self._next_index = 0
        self._open: object = None
        """The kind of the open block: the class of its parts, or the number of its call."""
        self._delta = b""
        """What stands before a piece of the open block."""
        self._called = False
        self._stopped = stop_fields(None, None, called=False)

    def opening(self) -> bytes:
        return _event("message_start", message=message_object(new_id("msg"), self._model, [], self._usage))

    def render(self, deltas: Sequence[ChoiceDelta]) -> bytes:
        events: list[bytes] = []
        for delta in deltas:
            if delta.parts is not None:
                for part in delta.parts:
                    self._add(events, part)
            elif delta.text:
                self._add(events, TextPart(delta.text))
            if delta.finish_reason is not None:
                self._close(events)
                reason, stopped_by = delta.finish_reason, delta.stop_reason
                self._stopped = stop_fields(reason, stopped_by, called=self._called, cut=self._cut)
                self.live = 0
        return b"".join(events)

    def ending(self) -> bytes:
        return _event("message_delta", delta=self._stopped, usage=usage_object(self._usage)) + _STOP

    def _add(self, events: list[bytes], part: Part) -> None:
        call = isinstance(part, ToolCallPart)
        kind = part.index if isinstance(part, ToolCallPart) else type(part)
        if kind != self._open:
            self._close(events)
            self._begin(events, part)
            self._open = kind
            self._called = self._called or call
        piece = part.arguments if isinstance(part, ToolCallPart) else part.text
        if piece:
            events += (self._delta, _encode(piece), _END)

    def _begin(self, events: list[bytes], part: Part) -> None:
        block, index = opened_block(part), self._next_index
        self._next_index += 1
        events.append(_event("content_block_start", index=index, content_block=block))
        if not index:
            events.append(_PING)
        kind, name = _DELTAS[block["type"]]
        head = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
        self._delta = head % (index, kind.encode(), name.encode())

    def _close(self, events: list[bytes]) -> None:
        if self._open is None:
            return
        index = self._next_index - 1
        if self._open is ReasoningPart:
            signature = {"type": "signature_delta", "signature": SIGNATURE}
            events.append(_event("content_block_delta", index=index, delta=signature))
        events.append(_event("content_block_stop", index=index))
        self._open = None


def _event(name: str, **fields: object) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + _encode({"type": name, **fields}) + b"\n\n"
