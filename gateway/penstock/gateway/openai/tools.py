"""The tools that a chat may call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.openai.schemas import ChatRequest
from penstock.tokenizers import Tool

_MAX_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CONSTRAINED = "needs structured output, which this server does not have yet"


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Definition(msgspec.Struct):
    function: _Function
    type: str = "function"


def offered_tools(request: ChatRequest) -> Sequence[Tool]:
    """What the model may call; empty where it may call nothing. Raises InvalidRequestError, and UnsupportedError for
    what only a grammar can promise."""
    tools = [_tool(number, each) for number, each in enumerate(_given(request))]
    choice = request.tool_choice
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise InvalidRequestError("tool_choice must be none, auto, required, or name a tool.", param="tool_choice")
    if choice in (None, "none", "auto"):
        return () if choice == "none" else tools
    if not tools:
        raise InvalidRequestError("tool_choice asks for a call, and there are no tools.", param="tool_choice")
    raise UnsupportedError(f"tool_choice other than none and auto {_CONSTRAINED}.", param="tool_choice")


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
    if not _NAME.fullmatch(function.name):
        message = f"{where}.function.name must have 1 to 64 letters, digits, underscores, dots or dashes."
        raise InvalidRequestError(message, param=f"{where}.function.name")
    if function.strict:
        raise UnsupportedError(f"{where}.function.strict {_CONSTRAINED}.", param=f"{where}.function.strict")
    return Tool(function.name, function.parameters)
