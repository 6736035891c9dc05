"""What a request says about tools."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.llm.model_parsers import ModelParsers
from penstock.tokenizers import JSON_LIST_OF_CALLS, Tool, ToolParser

MALFORMED = "malformed_arguments"
"""Shown to the model as the only argument of an earlier call whose arguments are no object: chat templates need one."""
_MAX_NAME = 256
"""What parsers read: `json_text.LONGEST_NAME`."""
_NOT_IN_NAMES = re.compile(r"""[\s<>{}\[\]()"'`,;=|｜\\]""")
"""What parsers take for the end of a name, and what would have to be escaped in a call."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    tools: Sequence[Tool] = ()
    """What the model may call."""
    is_forced: bool = False
    """It calls at least one of them, and writes nothing else."""
    is_named: bool = False
    """The request itself has named the one to call."""
    in_parallel: bool = True
    """Whether an answer may have more than one call."""
    shown: Sequence[Mapping[str, Any]] = ()
    """All tools of the request as functions, for chat templates. Nothing there where the API has another way."""

    def parser(self, parsers: ModelParsers) -> ToolParser | None:
        """What reads the calls of this answer. Forced calls need a form that a grammar can write; any model can write
        a JSON list."""
        if self.is_forced and (parsers.tools is None or parsers.tools.form is None):
            return JSON_LIST_OF_CALLS
        return parsers.tools


NO_TOOLS = ToolUse()


def check_arguments_schema(schema: Mapping[str, Any] | None, where: str) -> None:
    """Arguments of calls are objects. Raises InvalidRequestError; `where` is the caller's field."""
    kind = "object" if schema is None else schema.get("type", "object")
    if kind not in ("object", ["object"]):
        raise InvalidRequestError(f"{where}: the schema's type must be object.", param=where)


def check_tool_name(name: str, where: str) -> None:
    """Any script; nothing that could be taken for the end of a name. Raises InvalidRequestError; `where`
    is the caller's field."""
    if not 1 <= len(name) <= _MAX_NAME or not name.isprintable() or _NOT_IN_NAMES.search(name):
        message = (
            f"{where}: a tool's name must have 1 to {_MAX_NAME} characters, without white space, quotes, brackets and "
            "control characters."
        )
        raise InvalidRequestError(message, param=where)
