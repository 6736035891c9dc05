"""The tools that a request offers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.anthropic.schemas import ToolChoice
from penstock.gateway.anthropic.unsupported import NEEDS_GRAMMAR
from penstock.tokenizers import Tool

_MAX_TOOLS = 512
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")


class _Definition(msgspec.Struct):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None


@dataclass(frozen=True, slots=True)
class OfferedTools:
    known: Sequence[Tool] = ()
    """What the model may call."""
    shown: list[dict[str, Any]] | None = None
    """The same as chat templates show them to the model; None for no tools."""
    parallel: bool = True
    """Whether an answer may have more than one call."""


def offered_tools(given: list[dict[str, Any]] | None, choice: ToolChoice | None) -> OfferedTools:
    """Raises InvalidRequestError, and UnsupportedError for what only a grammar can promise."""
    if given and len(given) > _MAX_TOOLS:
        raise InvalidRequestError(f"At most {_MAX_TOOLS} tools are allowed.", param="tools")
    tools = [_definition(each, f"tools[{number}]") for number, each in enumerate(given or ())]
    if choice is not None:
        _check_choice(choice, tools)
    if not tools or (choice is not None and choice.type == "none"):
        return OfferedTools()
    return OfferedTools(
        known=[Tool(tool.name, tool.input_schema) for tool in tools],
        shown=[_shown(tool) for tool in tools],
        parallel=choice is None or not choice.disable_parallel_tool_use,
    )


def _check_choice(choice: ToolChoice, tools: list[_Definition]) -> None:
    if choice.type in ("auto", "none"):
        return
    if choice.type not in ("any", "tool"):
        raise InvalidRequestError("tool_choice.type must be auto, any, tool or none.", param="tool_choice.type")
    if not tools:
        raise InvalidRequestError("tool_choice asks for a call, and there are no tools.", param="tool_choice")
    raise UnsupportedError(f"tool_choice of type {choice.type} {NEEDS_GRAMMAR}.", param="tool_choice")


def _definition(given: dict[str, Any], where: str) -> _Definition:
    if given.get("type") not in (None, "custom"):
        raise UnsupportedError(f"{where}: tools that Anthropic's servers bring are not supported.", param=where)
    try:
        tool = msgspec.convert(given, _Definition)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{where}: {error}", param=where) from None
    if not _NAME.fullmatch(tool.name):
        message = f"{where}.name must have 1 to 128 letters, digits, underscores, dots or dashes."
        raise InvalidRequestError(message, param=f"{where}.name")
    if tool.strict:
        raise UnsupportedError(f"{where}.strict {NEEDS_GRAMMAR}.", param=f"{where}.strict")
    return tool


def _shown(tool: _Definition) -> dict[str, Any]:
    about = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **about, "parameters": tool.input_schema}}
