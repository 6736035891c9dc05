"""The tools that a chat may call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar
from unicodedata import category

import msgspec

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.generating.tool_use import ToolUse, check_arguments_schema
from penstock.gateway.openai.schemas import ChatRequest
from penstock.tokenizers import Tool

_MAX_TOOLS = 512
_MOST_NAME_CHARS = 256
"""No parser of calls reads a longer one."""
_MARKS_OF_NAMES = frozenset("_.-:/")


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Definition(msgspec.Struct):
    function: _Function
    type: str = "function"


class _Name(msgspec.Struct):
    name: str


class _NamedChoice(msgspec.Struct):
    function: _Name
    type: Literal["function"] = "function"


class _Allowed(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: list[_NamedChoice]


class _AllowedChoice(msgspec.Struct):
    allowed_tools: _Allowed


_C = TypeVar("_C", _NamedChoice, _AllowedChoice)


def tool_use(request: ChatRequest) -> ToolUse:
    """Raises InvalidRequestError, and UnsupportedError for tools that are not functions."""
    tools = [_tool(number, each) for number, each in enumerate(_given(request))]
    choice, parallel = request.tool_choice, request.parallel_tool_calls is not False
    if choice in (None, "none", "auto"):
        return ToolUse(() if choice == "none" else tools, in_parallel=parallel)
    if not tools:
        raise InvalidRequestError("tool_choice asks for a call, and there are no tools.", param="tool_choice")
    if choice == "required":
        return ToolUse(tools, is_forced=True, in_parallel=parallel)
    if not isinstance(choice, dict):
        raise InvalidRequestError("tool_choice must be none, auto, required, or name a tool.", param="tool_choice")
    if choice.get("type") == "allowed_tools":
        allowed = _converted(choice, _AllowedChoice).allowed_tools
        names = [each.function.name for each in allowed.tools]
        return ToolUse(_named(tools, names), is_forced=allowed.mode == "required", in_parallel=parallel)
    named = _named(tools, [_converted(choice, _NamedChoice).function.name])
    return ToolUse(named, is_forced=True, is_named=True, in_parallel=False)


def _named(tools: Sequence[Tool], names: Sequence[str]) -> list[Tool]:
    wanted = set(names)
    if not wanted or wanted - {tool.name for tool in tools}:
        raise InvalidRequestError("tool_choice names a tool that is not in tools.", param="tool_choice")
    return [tool for tool in tools if tool.name in wanted]


def _converted(choice: dict[str, Any], kind: type[_C]) -> _C:
    try:
        return msgspec.convert(choice, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"tool_choice: {error}", param="tool_choice") from None


def _given(request: ChatRequest) -> list[dict[str, Any]]:
    if request.tools is None:
        return []
    if not request.tools:
        raise InvalidRequestError("tools must not be an empty list.", param="tools")
    if len(request.tools) > _MAX_TOOLS:
        raise InvalidRequestError(f"At most {_MAX_TOOLS} tools are allowed.", param="tools")
    return request.tools


def _tool(number: int, given: dict[str, Any]) -> Tool:
    where = f"tools[{number}]"
    if given.get("type", "function") != "function":
        raise UnsupportedError(f"{where}: only tools of type function are supported.", param=where)
    try:
        function = msgspec.convert(given, _Definition).function
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{where}: {error}", param=where) from None
    if not _is_name(function.name):
        message = (
            f"{where}.function.name must have 1 to {_MOST_NAME_CHARS} letters, digits and characters of _.-:/ alone."
        )
        raise InvalidRequestError(message, param=f"{where}.function.name")
    check_arguments_schema(function.parameters, f"{where}.function.parameters")
    return Tool(function.name, function.parameters, bool(function.strict))


def _is_name(name: str) -> bool:
    """Letters may be of any script, with their marks. Nothing else: prompts and grammars have names between quotes,
    brackets and tags."""
    return 1 <= len(name) <= _MOST_NAME_CHARS and all(
        char.isalnum() or char in _MARKS_OF_NAMES or category(char).startswith("M") for char in name
    )
