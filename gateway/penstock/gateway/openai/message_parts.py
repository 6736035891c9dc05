"""Parts of a choice as the chat API shows them: piece by piece in a stream, or joined in one message."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import msgspec

from penstock.gateway.openai.objects import AssistantMessage, FunctionObject, ToolCallObject
from penstock.tokenizers import Part, ReasoningPart, TextPart, ToolCallPart


def message_delta(part: Part) -> dict[str, object]:
    match part:
        case TextPart(text):
            return {"content": text}
        case ReasoningPart(text):
            return {"reasoning_content": text, "reasoning": text}
        case ToolCallPart(name=None):
            return {"tool_calls": [{"index": part.index, "function": {"arguments": part.arguments}}]}
        case _:
            function = {"name": part.name, "arguments": part.arguments}
            call = {"index": part.index, "id": part.id or _new_call_id(), "type": "function", "function": function}
            return {"tool_calls": [call]}


def message(text: str, parts: Sequence[Part]) -> AssistantMessage:
    """`text` is that of the parts, and all there is where stages had nothing to do. A message of tool calls alone has
    no content, as OpenAI's has none."""
    reasoning = "".join([part.text for part in parts if isinstance(part, ReasoningPart)])
    calls = _tool_calls([part for part in parts if isinstance(part, ToolCallPart)])
    return AssistantMessage(
        content=None if calls and not text else text,
        reasoning_content=reasoning or msgspec.UNSET,
        reasoning=reasoning or msgspec.UNSET,
        tool_calls=calls or msgspec.UNSET,
    )


def has_call(parts: Sequence[Part]) -> bool:
    return any(isinstance(part, ToolCallPart) for part in parts)


def finish_reason(reason: str | None, *, called: bool) -> str | None:
    """A choice that stops after a tool call waits for the tool's answer."""
    return "tool_calls" if called and reason == "stop" else reason


def _tool_calls(parts: Sequence[ToolCallPart]) -> list[ToolCallObject]:
    calls: dict[int, list[ToolCallPart]] = {}
    for part in parts:
        calls.setdefault(part.index, []).append(part)
    return [_tool_call(pieces) for _, pieces in sorted(calls.items())]


def _tool_call(pieces: Sequence[ToolCallPart]) -> ToolCallObject:
    first = pieces[0]
    arguments = "".join([piece.arguments for piece in pieces])
    return ToolCallObject(first.id or _new_call_id(), FunctionObject(first.name or "", arguments))


def _new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
