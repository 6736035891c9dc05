"""The tools that a request offers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.apis.anthropic.schemas import ToolChoice
from penstock.gateway.generating.answer_shape import NO_TOOLS, ToolUse, check_arguments_schema, check_tool_name
from penstock.gateway.requests.context import RequestContext
from penstock.tokenizers import Tool

# Tools that Anthropic has named and its clients run: shell, text editor, memory. A request says no more than the
# type. What a model has to know is here, as the documentation has it:
# https://docs.claude.com/en/docs/agents-and-tools/tool-use/overview.

_TYPE = re.compile(r"(bash|text_editor|memory)_([0-9]{8})")
_RENAMED = "20250429"
"""Versions of the text editor from this one on have another name, and undo nothing."""
_PATH = {"type": "string", "description": "Absolute path of the file or directory."}
_EDITS: dict[str, Any] = {
    "file_text": {"type": "string", "description": "For create: the content of the new file."},
    "old_str": {"type": "string", "description": "For str_replace: the text to replace, exactly as it is in the file."},
    "new_str": {"type": "string", "description": "For str_replace: the new text."},
    "insert_line": {"type": "integer", "description": "For insert: the line to insert behind; 0 for the beginning."},
    "insert_text": {"type": "string", "description": "For insert: the text to insert."},
    "view_range": {
        "type": "array",
        "items": {"type": "integer"},
        "minItems": 2,
        "maxItems": 2,
        "description": "For view: the first and the last line to show, counted from 1; -1 as the last is the end.",
    },
}


def client_tool(kind: object) -> dict[str, Any] | None:
    """The definition of a tool of this type; None: it is none of these. Takes any date, as the nearest known version:
    names and arguments change with it only where the documentation says so."""
    known = _TYPE.fullmatch(kind) if isinstance(kind, str) else None
    match known and known[1]:
        case "bash":
            return _BASH
        case "memory":
            return _MEMORY
        case "text_editor":
            return _TEXT_EDITOR if known is not None and known[2] >= _RENAMED else _OLD_TEXT_EDITOR
        case _:
            return None


def _commands(*names: str) -> dict[str, Any]:
    return {"type": "string", "enum": list(names), "description": "What to do."}


_BASH: dict[str, Any] = {
    "name": "bash",
    "description": "Runs a command in a bash shell that keeps its state from call to call.",
    "input_schema": {
        "type": "object",
        "properties": {
            "command": {"type": "string", "description": "The command to run. Needed unless restart is true."},
            "restart": {"type": "boolean", "description": "True: starts the shell again."},
        },
        "anyOf": [{"required": ["command"]}, {"required": ["restart"]}],
    },
}
_TEXT_EDITOR: dict[str, Any] = {
    "name": "str_replace_based_edit_tool",
    "description": "Views, creates and edits text files.",
    "input_schema": {
        "type": "object",
        "properties": {"command": _commands("view", "create", "str_replace", "insert"), "path": _PATH, **_EDITS},
        "required": ["command", "path"],
    },
}
_NEW_TEXT = {"type": "string", "description": "For str_replace and insert: the new text."}
_OLD_TEXT_EDITOR: dict[str, Any] = {
    "name": "str_replace_editor",
    "description": "Views, creates and edits text files.",
    "input_schema": {
        "type": "object",
        "properties": {
            "command": _commands("view", "create", "str_replace", "insert", "undo_edit"),
            "path": _PATH,
            **{name: schema for name, schema in _EDITS.items() if name != "insert_text"},
            "new_str": _NEW_TEXT,
        },
        "required": ["command", "path"],
    },
}
_MEMORY: dict[str, Any] = {
    "name": "memory",
    "description": "Views and edits files below /memories, which last from one conversation to the next.",
    "input_schema": {
        "type": "object",
        "properties": {
            "command": _commands("view", "create", "str_replace", "insert", "delete", "rename"),
            "path": {"type": "string", "description": "The file or directory, below /memories. Not for rename."},
            **_EDITS,
            "old_path": {"type": "string", "description": "For rename: the path until now."},
            "new_path": {"type": "string", "description": "For rename: the new path."},
        },
        "required": ["command"],
    },
}


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
    declared: list[dict[str, Any]] | None, choice: ToolChoice | None, context: RequestContext
) -> OfferedTools:
    """Without those that this server cannot run, which are noted. Raises InvalidRequestError."""
    if declared and len(declared) > _MAX_TOOLS:
        raise InvalidRequestError(f"At most {_MAX_TOOLS} tools are allowed.", param="tools")
    tools = [_definition(declaration, f"tools[{number}]", context) for number, declaration in enumerate(declared or ())]
    definitions = [tool for tool in tools if tool is not None]
    use = _tool_use([Tool(tool.name, tool.input_schema, bool(tool.strict)) for tool in definitions], choice or _AUTO)
    return OfferedTools(use, [_shown(tool) for tool in definitions], definitions) if use.tools else OfferedTools()


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


def _definition(declaration: dict[str, Any], where: str, context: RequestContext) -> ToolDefinition | None:
    """None: a tool of Anthropic's servers, or of a screen, which nobody sees here."""
    if declaration.get("type") not in (None, "custom") and "input_schema" not in declaration:
        known = client_tool(declaration["type"])
        if known is None:
            context.ignore(where, "this server runs no tools of this type.")
            return None
        declaration = known | {name: declaration[name] for name in ("name", "strict") if name in declaration}
    try:
        tool = msgspec.convert(declaration, ToolDefinition)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{where}: {error}", param=where) from None
    check_tool_name(tool.name, f"{where}.name")
    check_arguments_schema(tool.input_schema, f"{where}.input_schema")
    return tool


def _shown(tool: ToolDefinition) -> dict[str, Any]:
    about = {} if tool.description is None else {"description": tool.description}
    return {"type": "function", "function": {"name": tool.name, **about, "parameters": tool.input_schema}}
