"""The tools that a chat may call."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any, Literal, TypeVar

import msgspec

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.openai.schemas import ChatRequest
from penstock.gateway.generating.answer_shape import ToolUse, check_arguments_schema, check_tool_name
from penstock.gateway.requests.bounded_json import echoed
from penstock.gateway.requests.context import RequestContext
from penstock.tokenizers import Tool

_MAX_TOOLS = 512
INPUT = "input"
"""The one argument of a custom tool, shown to models as a function."""


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Definition(msgspec.Struct):
    function: _Function
    type: str = "function"


class _Syntax(msgspec.Struct):
    syntax: str = ""
    definition: str = ""


class _Format(msgspec.Struct):
    type: str = "text"
    grammar: _Syntax | None = None


class _Custom(msgspec.Struct):
    name: str
    description: str | None = None
    format: _Format | None = None


class _CustomDefinition(msgspec.Struct):
    custom: _Custom


class _Name(msgspec.Struct):
    name: str


class _NamedChoice(msgspec.Struct):
    function: _Name
    type: Literal["function"] = "function"


class _CustomChoice(msgspec.Struct):
    custom: _Name


class _Allowed(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class _AllowedChoice(msgspec.Struct):
    allowed_tools: _Allowed


_C = TypeVar("_C")


def tool_use(request: ChatRequest, context: RequestContext) -> ToolUse:
    """Raises InvalidRequestError. Tools of a type that this server cannot run are left out, and noted as ignored."""
    if request.functions:
        request = _with_tools(request)
    forms = [form for form in map(_form_of, range(_count(request)), request.tools or (), repeat(context)) if form]
    tools = [_tool(number, form) for number, form in forms]
    use = _chosen(request, tools)
    return replace(use, shown=[form for _, form in forms]) if forms else use


def _with_tools(request: ChatRequest) -> ChatRequest:
    """`functions` and `function_call` in the newer form: of these there is one call in an answer. Raises
    InvalidRequestError."""
    if request.tools:
        raise InvalidRequestError("functions and tools exclude each other.", param="functions")
    choice = request.function_call
    return msgspec.structs.replace(
        request,
        tools=[{"type": "function", "function": function} for function in request.functions or ()],
        tool_choice={"type": "function", "function": choice} if isinstance(choice, dict) else choice,
        parallel_tool_calls=False,
    )


def custom_names(request: ChatRequest) -> frozenset[str]:
    """Of a request that `tool_use` lets pass: tools whose calls have a text instead of arguments."""
    return frozenset([tool["custom"]["name"] for tool in request.tools or () if tool.get("type") == "custom"])


def custom_arguments(text: str) -> str:
    """The text of a call as the arguments of a function."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The text that a model has written as the argument of a custom tool. Where it has written something else, or was
    cut off, all that it has written."""
    try:
        value = msgspec.json.decode(arguments, type=dict[str, Any]).get(INPUT)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return arguments
    return value if isinstance(value, str) else arguments


def _chosen(request: ChatRequest, tools: list[Tool]) -> ToolUse:
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
        names = list(map(_named_tool, allowed.tools))
        return ToolUse(_named(tools, names), is_forced=allowed.mode == "required", in_parallel=parallel)
    return ToolUse(_named(tools, [_named_tool(choice)]), is_forced=True, is_named=True, in_parallel=False)


def _named_tool(choice: dict[str, Any]) -> str:
    if choice.get("type") == "custom":
        return _converted(choice, _CustomChoice).custom.name
    return _converted(choice, _NamedChoice).function.name


def _named(tools: Sequence[Tool], names: Sequence[str]) -> list[Tool]:
    chosen = set(names)
    unknown = chosen - {tool.name for tool in tools}
    if unknown:
        name = echoed(next(name for name in names if name in unknown))
        raise InvalidRequestError(f"tool_choice names {name}, which is not in tools.", param="tool_choice")
    if not chosen:
        raise InvalidRequestError("tool_choice names no tool.", param="tool_choice")
    return [tool for tool in tools if tool.name in chosen]


def _converted(choice: dict[str, Any], kind: type[_C]) -> _C:
    try:
        return msgspec.convert(choice, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"tool_choice: {error}", param="tool_choice") from None


def _count(request: ChatRequest) -> int:
    count = len(request.tools or ())
    if count > _MAX_TOOLS:
        raise InvalidRequestError(f"At most {_MAX_TOOLS} tools are allowed.", param="tools")
    return count


def _form_of(number: int, sent: dict[str, Any], context: RequestContext) -> tuple[int, dict[str, Any]] | None:
    """The tool as a function, for chat templates: as it was sent if it is one. None for other types."""
    kind, where = sent.get("type", "function"), f"tools[{number}]"
    if not isinstance(kind, str):
        raise InvalidRequestError(f"{where}.type must be a text.", param=f"{where}.type")
    if kind == "function":
        return number, sent
    if kind == "custom":
        return number, _custom_form(_definition(sent, _CustomDefinition, where).custom, where, context)
    context.ignore(f"{where}.type", "this server runs no tools of this type.")
    return None


def _custom_form(tool: _Custom, where: str, context: RequestContext) -> dict[str, Any]:
    """A grammar for the text is shown to the model, and nothing makes it follow it."""
    description = tool.description or ""
    if tool.format is not None and tool.format.type != "text":
        context.ignore(f"{where}.custom.format", "the text of a custom tool is not held to a format.")
        if tool.format.grammar is not None:
            grammar = tool.format.grammar
            description += f"\n\nThe input follows this grammar ({grammar.syntax}):\n{grammar.definition}"
    parameters = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}
    function = {"name": tool.name, "description": description.strip(), "parameters": parameters}
    return {"type": "function", "function": function}


def _tool(number: int, form: dict[str, Any]) -> Tool:
    where = f"tools[{number}]"
    function = _definition(form, _Definition, where).function
    check_tool_name(function.name, f"{where}.function.name")
    check_arguments_schema(function.parameters, f"{where}.function.parameters")
    return Tool(function.name, function.parameters, bool(function.strict))


def _definition(form: dict[str, Any], kind: type[_C], where: str) -> _C:
    try:
        return msgspec.convert(form, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{where}: {error}", param=where) from None
