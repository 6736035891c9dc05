"""Chat messages as clients send them, made into what chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .content_format import ContentFormat
from .errors import ChatTemplateError

_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which clients send an assistant's reasoning; templates read the first, those of gpt-oss the last."""


def normalize_messages(
    messages: Sequence[Mapping[str, Any]],
    content_format: ContentFormat = "string",
    *,
    keep_none_content: bool = False,
) -> list[dict[str, Any]]:
    """New messages; the ones given are left as they are.

    Keys without a value are dropped. `keep_none_content` keeps (or sets) `content: None` beside tool calls, for
    templates that test for it. Tool calls' arguments become objects where they are JSON. With `string`, content
    parts are joined by newlines; with `openai` they stay. Raises ChatTemplateError for messages of another shape.
    """
    return [
        _normalize(f"messages[{n}]", message, content_format, keep_none_content) for n, message in enumerate(messages)
    ]


def _normalize(where: str, message: object, content_format: ContentFormat, keep_none_content: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"{where} must be an object")
    result = {key: value for key, value in message.items() if value is not None}
    if not isinstance(result.get("role"), str):
        raise ChatTemplateError(f"{where} has no role")
    if "content" in result:
        result["content"] = _content(f"{where}.content", result["content"], content_format)
    elif keep_none_content and result.get("tool_calls"):
        result["content"] = None
    if "tool_calls" in result:
        result["tool_calls"] = _tool_calls(f"{where}.tool_calls", result["tool_calls"])
    reasoning = next((result[name] for name in _REASONING if name in result), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    return result


def _content(where: str, content: object, content_format: ContentFormat) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ChatTemplateError(f"{where} must be a string or a list of parts")
    parts = [_part(f"{where}[{n}]", part) for n, part in enumerate(content)]
    if content_format == "openai":
        return parts
    for n, part in enumerate(parts):
        if part["type"] != "text":
            raise ChatTemplateError(f"{where}[{n}]: this model takes no content of type {part['type']!r}")
    return "\n".join(part["text"] for part in parts)


def _part(where: str, part: object) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise ChatTemplateError(f"{where} must be an object with a type")
    if part["type"] in _TEXT_PARTS or part["type"] == "refusal":
        text = part.get("refusal" if part["type"] == "refusal" else "text")
        if not isinstance(text, str):
            raise ChatTemplateError(f"{where} has no text")
        return {"type": "text", "text": text}
    return {key: value for key, value in part.items() if value is not None}


def _tool_calls(where: str, calls: object) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ChatTemplateError(f"{where} must be a list")
    return [_tool_call(f"{where}[{n}]", call) for n, call in enumerate(calls)]


def _tool_call(where: str, call: object) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise ChatTemplateError(f"{where} must be an object")
    result = {key: value for key, value in call.items() if value is not None}
    function = result.get("function")
    if isinstance(function, Mapping):
        result["function"] = {**function, "arguments": _arguments(function.get("arguments"))}
    return result


def _arguments(arguments: object) -> object:
    """What is no JSON object stays as the model wrote it: it is for the template to accept or refuse."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
