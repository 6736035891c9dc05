"""Input items: what each type must have, and how they are shown again."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.responses.encrypted_content import decode_reasoning
from penstock.gateway.responses.schemas import ContentPart, InputItem

_ROLES = {"user": "input_text", "system": "input_text", "developer": "input_text", "assistant": "output_text"}
"""Each with the type of its text."""
_UNSUPPORTED_PARTS = frozenset({"input_image", "input_file", "input_audio", "refusal", "computer_screenshot"})
_UNSUPPORTED_ITEMS = frozenset(
    {
        "additional_tools", "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "compaction",
        "compaction_trigger", "computer_call", "computer_call_output", "configuration_update", "custom_tool_call",
        "custom_tool_call_output", "file_search_call", "image_generation_call", "item_reference", "local_shell_call",
        "local_shell_call_output", "mcp_approval_request", "mcp_approval_response", "mcp_call", "mcp_list_tools",
        "program", "program_output", "shell_call", "shell_call_output", "tool_search_call", "tool_search_output",
        "web_search_call",
    }
)  # fmt: skip
"""Types that OpenAI's servers know."""
_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def fresh_item_id(kind: str) -> str:
    """For an item of this type."""
    return new_id(_PREFIXES[kind])


def input_items(given: str | list[InputItem], field: str = "input") -> list[InputItem]:
    """`field` is the request's. Raises InvalidRequestError, and UnsupportedError for items and parts that this server
    does not take."""
    if isinstance(given, str):
        return [InputItem(role="user", content=given)]
    if not given:
        raise InvalidRequestError(f"{field} must not be empty.", param=field)
    for number, item in enumerate(given):
        _check(item, f"{field}[{number}]")
    return [_readable(item, f"{field}[{number}]") for number, item in enumerate(given)]


def content_text(content: str | Sequence[ContentPart] | None) -> str:
    """Parts are joined by line ends, as those of chat messages."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join([part.text or "" for part in content])


def shown_item(item: InputItem) -> dict[str, Any]:
    """As a list of input items shows it."""
    head = {"id": item.id or fresh_item_id(item.type), "type": item.type, "status": "completed"}
    match item.type:
        case "function_call":
            return {**head, "call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        case "function_call_output":
            output = item.output if isinstance(item.output, str) else _shown_parts(item.output, "input_text")
            return {**head, "call_id": item.call_id, "output": output}
        case "reasoning":
            return {**head, "summary": [], "content": _shown_parts(item.content, "reasoning_text")}
        case _:
            return {**head, "role": item.role, "content": _shown_parts(item.content, _ROLES[item.role or ""])}


def _shown_parts(content: str | list[ContentPart] | None, kind: str) -> list[dict[str, Any]]:
    parts = [ContentPart(kind, content)] if isinstance(content, str) else content or []
    more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
    return [{"type": kind, "text": part.text, **more} for part in parts]


def _check(item: InputItem, where: str) -> None:
    match item.type:
        case "message":
            _check_message(item, where)
        case "function_call":
            _need(item, where, "call_id", "name", "arguments")
        case "function_call_output":
            _need(item, where, "call_id", "output")
            _check_parts(item.output, "input_text", f"{where}.output")
        case "reasoning":
            if isinstance(item.content, str):
                raise InvalidRequestError(f"{where}.content must be an array.", param=f"{where}.content")
            _check_parts(item.content, "reasoning_text", f"{where}.content")
        case kind if kind in _UNSUPPORTED_ITEMS:
            raise UnsupportedError(f"{where}: items of type '{kind}' are not supported.", param=where)
        case _:
            raise InvalidRequestError(f"{where}.type: no such type of item.", param=f"{where}.type")


def _check_message(item: InputItem, where: str) -> None:
    kind = _ROLES.get(item.role or "")
    if kind is None:
        message = f"{where}.role must be user, assistant, system or developer."
        raise InvalidRequestError(message, param=f"{where}.role")
    _need(item, where, "content")
    _check_parts(item.content, kind, f"{where}.content")


def _readable(item: InputItem, where: str) -> InputItem:
    """Reasoning that has only `encrypted_content` is given its content. Raises InvalidRequestError."""
    if item.type != "reasoning" or item.content or not item.encrypted_content:
        return item
    text = decode_reasoning(item.encrypted_content, f"{where}.encrypted_content")
    return InputItem(type="reasoning", id=item.id, content=[ContentPart("reasoning_text", text)])


def _need(item: InputItem, where: str, *names: str) -> None:
    for name in names:
        if getattr(item, name) is None:
            raise InvalidRequestError(f"{where}.{name} is missing.", param=f"{where}.{name}")


def _check_parts(content: str | list[ContentPart] | None, kind: str, where: str) -> None:
    for number, part in enumerate(() if isinstance(content, str) else content or ()):
        place = f"{where}[{number}]"
        if part.type in _UNSUPPORTED_PARTS:
            raise UnsupportedError(f"{place}: content of type '{part.type}' is not supported.", param=place)
        if part.type != kind:
            raise InvalidRequestError(f"{place}.type must be {kind}.", param=f"{place}.type")
        if part.text is None:
            raise InvalidRequestError(f"{place}.text is missing.", param=f"{place}.text")
