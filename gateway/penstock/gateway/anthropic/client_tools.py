"""Tools that Anthropic has named and its clients run: shell, text editor, memory. A request says no more than the type.
What a model has to know is here, as the documentation has it:
https://docs.claude.com/en/docs/agents-and-tools/tool-use/overview."""

from __future__ import annotations

import re
from typing import Any

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
