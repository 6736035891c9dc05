"""Parts of a choice as the chat API shows them: piece by piece in a stream, or joined in one message."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from penstock.gateway.openai.objects import (
    AssistantMessage,
    CustomCallObject,
    CustomObject,
    FunctionObject,
    ToolCallObject,
)
from penstock.gateway.openai.schemas import ChatRequest
from penstock.gateway.openai.tools import custom_input, custom_names
from penstock.tokenizers import Part, ReasoningPart, TextPart, ToolCallPart


@dataclass(frozen=True, slots=True)
class CallForms:
    """How an answer shows its calls, where that is not as calls of functions."""

    custom: frozenset[str] = frozenset()
    """Names of tools whose calls have a text instead of arguments."""
    older: bool = False
    """The one call is the message's `function_call`, as before there were tools."""


FUNCTIONS = CallForms()


def call_forms(request: ChatRequest) -> CallForms:
    custom = custom_names(request)
    return CallForms(custom, older=request.functions is not None) if custom or request.functions else FUNCTIONS


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


def older_delta(part: ToolCallPart) -> dict[str, object]:
    name = {} if part.name is None else {"name": part.name}
    return {"function_call": {**name, "arguments": part.arguments}}


def custom_delta(part: ToolCallPart) -> dict[str, object]:
    """The beginning of a custom tool's call."""
    custom = {"name": part.name, "input": ""}
    call = {"index": part.index, "id": part.id or _new_call_id(), "type": "custom", "custom": custom}
    return {"tool_calls": [call]}


def input_delta(index: int, arguments: str) -> dict[str, object]:
    """The rest of it: its `arguments` are complete."""
    return {"tool_calls": [{"index": index, "custom": {"input": custom_input(arguments)}}]}


def message(text: str, parts: Sequence[Part], forms: CallForms = FUNCTIONS) -> AssistantMessage:
    """`text` is that of the parts, and all there is where stages had nothing to do. A message of tool calls alone has
    no content, as OpenAI's has none."""
    reasoning = "".join([part.text for part in parts if isinstance(part, ReasoningPart)])
    calls = _tool_calls([part for part in parts if isinstance(part, ToolCallPart)], forms.custom)
    shown = AssistantMessage(
        content=None if calls and not text else text,
        reasoning_content=reasoning or msgspec.UNSET,
        reasoning=reasoning or msgspec.UNSET,
    )
    if forms.older and calls and isinstance(calls[0], ToolCallObject):
        shown.function_call = calls[0].function
    elif calls:
        shown.tool_calls = calls
    return shown


def has_call(parts: Sequence[Part]) -> bool:
    return any(isinstance(part, ToolCallPart) for part in parts)


def finish_reason(reason: str | None, *, called: bool, forms: CallForms = FUNCTIONS) -> str | None:
    """A choice that stops after a tool call waits for the tool's answer."""
    if called and reason == "stop":
        return "function_call" if forms.older else "tool_calls"
    return reason


def _tool_calls(parts: Sequence[ToolCallPart], custom: frozenset[str]) -> list[ToolCallObject | CustomCallObject]:
    calls: dict[int, list[ToolCallPart]] = {}
    for part in parts:
        calls.setdefault(part.index, []).append(part)
    return [_tool_call(pieces, custom) for _, pieces in sorted(calls.items())]


def _tool_call(pieces: Sequence[ToolCallPart], custom: frozenset[str]) -> ToolCallObject | CustomCallObject:
    first = pieces[0]
    call_id, name = first.id or _new_call_id(), first.name or ""
    arguments = "".join([piece.arguments for piece in pieces])
    if name in custom:
        return CustomCallObject(call_id, CustomObject(name, custom_input(arguments)))
    return ToolCallObject(call_id, FunctionObject(name, arguments))


def _new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
