"""A whole answer as the Messages API shows it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.models.language.dataplane import ChoiceDelta, Usage
from penstock.gateway.requests.bounded_json import decode_json
from penstock.tokenizers import Part, ReasoningPart, TextPart, ToolCallPart

SIGNATURE = "unsigned"
"""Clients expect a signature behind a thought and send it back. Here nobody asks who has thought it."""
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}
_CONTEXT_FULL = "model_context_window_exceeded"


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex[:24]}"


def message_object(message_id: str, model: str, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    """One that has not ended."""
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage_object(usage),
    }


def usage_object(usage: Usage) -> dict[str, int]:
    """The prompt's tokens are divided into those that had to be computed and those that the cache had."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def stop_fields(
    finish_reason: str | None, stopped_by: str | int | None, *, called: bool, cut: bool = False
) -> dict[str, str | None]:
    """`stopped_by`: the stop string or token that ended the answer. `called`: it has a tool call. `cut`: the context
    left less than `max_tokens`."""
    if isinstance(stopped_by, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stopped_by}
    if cut and finish_reason == "length":
        return {"stop_reason": _CONTEXT_FULL, "stop_sequence": None}
    reason = "tool_use" if called and finish_reason == "stop" else _STOP_REASONS.get(finish_reason or "stop")
    return {"stop_reason": reason, "stop_sequence": None}


def content_blocks(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Neighbouring parts of the same kind, or of the same call, are one block."""
    return [_block(list(group)) for _, group in groupby(parts, key=_kind)]


def opened_block(part: Part) -> dict[str, Any]:
    """The block that begins with this part, still empty."""
    match part:
        case TextPart():
            return {"type": "text", "text": ""}
        case ReasoningPart():
            return {"type": "thinking", "thinking": "", "signature": ""}
        case ToolCallPart():
            return {"type": "tool_use", "id": part.id or new_id("toolu"), "name": part.name or "", "input": {}}


def _kind(part: Part) -> object:
    return part.index if isinstance(part, ToolCallPart) else type(part)


def _block(parts: list[Part]) -> dict[str, Any]:
    block = opened_block(parts[0])
    match block["type"]:
        case "tool_use":
            block["input"] = _input("".join([part.arguments for part in parts if isinstance(part, ToolCallPart)]))
        case kind:
            text = "".join([part.text for part in parts if not isinstance(part, ToolCallPart)])
            block.update({"thinking": text, "signature": SIGNATURE} if kind == "thinking" else {"text": text})
    return block


def _input(arguments: str) -> dict[str, Any]:
    """Empty for a call that was cut off: the stop reason says that."""
    try:
        return decode_json((arguments or "{}").encode(), dict[str, Any])
    except InvalidRequestError:
        return {}


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
