"""The tools that a request offers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.anthropic.schemas import CacheControl, ToolChoice
from penstock.gateway.generating.tool_use import NO_TOOLS, ToolUse, check_arguments_schema
from penstock.tokenizers import Tool

_MAX_TOOLS = 512
_AUTO = ToolChoice("auto")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class _Definition(msgspec.Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None


@dataclass(frozen=True, slots=True)
class OfferedTools:
    use: ToolUse = NO_TOOLS
    shown: list[dict[str, Any]] | None = None
    """All of them, as chat templates show them to the model; None for no tools."""


def offered_tools(given: list[dict[str, Any]] | None, choice: ToolChoice | None) -> OfferedTools:
    """Raises InvalidRequestError, and UnsupportedError for tools of Anthropic's servers."""
    if given and len(given) > _MAX_TOOLS:
        raise InvalidRequestError(f"At most {_MAX_TOOLS} tools are allowed.", param="tools")
    found = [_definition(each, f"tools[{number}]") for number, each in enumerate(given or ())]
    use = _tool_use([Tool(tool.name, tool.input_schema, bool(tool.strict)) for tool in found], choice or _AUTO)
    return OfferedTools(use, [_shown(tool) for tool in found]) if use.tools else OfferedTools()


def _tool_use(tools: Sequence[Tool], choice: ToolChoice) -> ToolUse:
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "auto":
        return ToolUse(tools, in_parallel=parallel)
    if choice.type == "none":
        return NO_TOOLS
    if choice.type not in ("any", "tool"):
        raise InvalidRequestError("tool_choice.type must be auto, any, tool or none.", param="tool_choice.type")
    if not tools:
        raise InvalidRequestError("tool_choice asks for a call, and there are no tools.", param="tool_choice")
    if choice.type == "any":
        return ToolUse(tools, is_forced=True, in_parallel=parallel)
    named = [tool for tool in tools if tool.name == choice.name]
    if not named:
        raise InvalidRequestError("tool_choice.name names a tool that is not in tools.", param="tool_choice.name")
    return ToolUse(named, is_forced=True, is_named=True, in_parallel=False)


def _definition(given: dict[str, Any], where: str) -> _Definition:
    if given.get("type") not in (None, "custom"):
        raise UnsupportedError(f"{where}: tools that run on Anthropic's servers are not supported.", param=where)
    try:
        tool = msgspec.convert(given, _Definition)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{where}: {error}", param=where) from None
    if not _NAME.fullmatch(tool.name):
        message = f"{where}.name must have 1 to 128 letters, digits, underscores, dots or dashes."
        raise InvalidRequestError(message, param=f"{where}.name")
    check_arguments_schema(tool.input_schema, f"{where}.input_schema")
    return tool


def _shown(tool: _Definition) -> dict[str, Any]:
    about = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **about, "parameters": tool.input_schema}}
