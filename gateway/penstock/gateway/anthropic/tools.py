"""The tools that a request offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.anthropic.client_tools import client_tool
from penstock.gateway.anthropic.schemas import ToolChoice
from penstock.gateway.front.context import RequestContext
from penstock.gateway.generating.answer_shape import NO_TOOLS, ToolUse, check_arguments_schema, check_tool_name
from penstock.tokenizers import Tool

_MAX_TOOLS = 512
_AUTO = ToolChoice("auto")


class ToolDefinition(msgspec.Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


@dataclass(frozen=True, slots=True)
class OfferedTools:
    use: ToolUse = NO_TOOLS
    shown: list[dict[str, Any]] | None = None
    """All of them, as chat templates show them to the model; None for no tools."""
    definitions: Sequence[ToolDefinition] = ()
    """Of the shown ones."""


def offered_tools(
    given: list[dict[str, Any]] | None, choice: ToolChoice | None, context: RequestContext
) -> OfferedTools:
    """Without those that this server cannot run, which are noted. Raises InvalidRequestError."""
    if given and len(given) > _MAX_TOOLS:
        raise InvalidRequestError(f"At most {_MAX_TOOLS} tools are allowed.", param="tools")
    tools = [_definition(each, f"tools[{number}]", context) for number, each in enumerate(given or ())]
    found = [tool for tool in tools if tool is not None]
    use = _tool_use([Tool(tool.name, tool.input_schema, bool(tool.strict)) for tool in found], choice or _AUTO)
    return OfferedTools(use, [_shown(tool) for tool in found], found) if use.tools else OfferedTools()


def _tool_use(tools: Sequence[Tool], choice: ToolChoice) -> ToolUse:
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "auto":
        return ToolUse(tools, in_parallel=parallel)
    if choice.type == "none":
        return NO_TOOLS
    if choice.type not in ("any", "tool"):
        raise InvalidRequestError("tool_choice.type must be auto, any, tool or none.", param="tool_choice.type")
    if not tools:
        message = "tool_choice asks for a call, and there are no tools that anybody here runs."
        raise InvalidRequestError(message, param="tool_choice")
    if choice.type == "any":
        return ToolUse(tools, is_forced=True, in_parallel=parallel)
    named = [tool for tool in tools if tool.name == choice.name]
    if not named:
        message = "tool_choice.name names a tool that is not in tools, or that this server cannot run."
        raise InvalidRequestError(message, param="tool_choice.name")
    return ToolUse(named, is_forced=True, is_named=True, in_parallel=False)


def _definition(given: dict[str, Any], where: str, context: RequestContext) -> ToolDefinition | None:
    """None: a tool of Anthropic's servers, or of a screen, which nobody sees here."""
    if given.get("type") not in (None, "custom") and "input_schema" not in given:
        known = client_tool(given["type"])
        if known is None:
            context.ignore(where, "this server runs no tools of this type.")
            return None
        given = known | {name: given[name] for name in ("name", "strict") if name in given}
    try:
        tool = msgspec.convert(given, ToolDefinition)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{where}: {error}", param=where) from None
    check_tool_name(tool.name, f"{where}.name")
    check_arguments_schema(tool.input_schema, f"{where}.input_schema")
    return tool


def _shown(tool: ToolDefinition) -> dict[str, Any]:
    about = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **about, "parameters": tool.input_schema}}
