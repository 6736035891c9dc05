"""A whole answer as the Messages API shows it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.front.bounded_json import decode_json
from penstock.gateway.llm.dataplane import Usage
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
