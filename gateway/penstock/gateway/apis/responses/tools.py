"""A request's tools as functions, which is all that chat templates and parsers of calls know, and the way back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.apis.responses.schemas import InputItem, ResponsesRequest
from penstock.gateway.models.language.sampling import bounded
from penstock.gateway.requests.context import RequestContext

_MOST_TOOLS = 1024
"""With those in namespaces, and with those that are left out. Of functions, chats take fewer."""
_MOST_CALLS = 2**31 - 1
_MOST_NAME_CHARS = 256
_HOSTED = frozenset(
    {
        "apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview", "file_search",
        "image_generation", "local_shell", "mcp", "programmatic_tool_calling", "shell", "tool_search", "web_search",
        "web_search_preview", "web_search_preview_2025_03_11",
    }
)  # fmt: skip
"""Types that OpenAI's servers know, which errors may name. Other types are left out, too."""
_FIELDS = ("name", "description", "parameters", "strict")
_NO_SUCH_TYPE = "this server runs no tools of this type."


@dataclass(frozen=True, slots=True)
class Callee:
    """The tool that a call is for, in the request's words."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class ResponseTools:
    functions: list[dict[str, Any]] | None = None
    """As chats have them; None: there are no tools."""
    choice: str | dict[str, Any] | None = None
    """As chats have it."""
    places: Sequence[str] = ()
    """Of each function, where it stands in the request."""
    callees: Mapping[str, Callee] = field(default_factory=dict)
    """By the function's name, of all that are not simply a function of the request."""
    names: Mapping[Callee, str] = field(default_factory=dict)
    """The other way round."""
    most_calls: int | None = None
    """In an answer."""

    def function_name(self, item: InputItem) -> str:
        """The function that a call of the history was for."""
        name, is_custom = item.name or "", item.type == "custom_tool_call"
        if item.namespace is None and not is_custom:
            return name
        return self.names.get(Callee(name, item.namespace, is_custom)) or _joined(item.namespace, name)


NO_TOOLS = ResponseTools()


def response_tools(request: ResponsesRequest, context: RequestContext) -> ResponseTools:
    """Tools that this server and its client cannot run are left out, and `context` notes it. Raises
    InvalidRequestError, and UnsupportedError for a choice of such a tool."""
    if request.tools is None and request.tool_choice is None and request.max_tool_calls is None:
        return NO_TOOLS
    tools = _flat(request.tools or (), context)
    names = _names(tools)
    callees = {name: tool.callee for name, tool in zip(names, tools, strict=True) if tool.callee is not None}
    by_callee = {callee: name for name, callee in callees.items()}
    return ResponseTools(
        [tool.function(name, context) for name, tool in zip(names, tools, strict=True)] or None,
        _choice(request.tool_choice, by_callee, context),
        [tool.place for tool in tools],
        callees,
        by_callee,
        None if request.max_tool_calls is None else bounded(request.max_tool_calls, "max_tool_calls", 1, _MOST_CALLS),
    )


@dataclass(frozen=True, slots=True)
class _DeclaredTool:
    """A tool that a client can run."""

    tool: Mapping[str, Any]
    place: str
    callee: Callee | None
    """None for a plain function, whose name nobody has checked yet."""
    about: str = ""
    """What is said of its namespace: with the first tool of it."""

    def function(self, name: str, context: RequestContext) -> dict[str, Any]:
        function = {field: self.tool[field] for field in _FIELDS if self.tool.get(field) is not None}
        if self.callee is None:
            return {"type": "function", "function": function}
        function["name"] = name
        texts = [function.get("description", ""), self.about]
        if self.callee.is_custom:
            parameters, strict, form = self._custom(context)
            function |= {"parameters": parameters, "strict": strict}
            texts.insert(1, form)
        if isinstance(texts[0], str) and any(texts):
            function["description"] = "\n\n".join(filter(None, texts))
        return {"type": "function", "function": function}

    def _custom(self, context: RequestContext) -> tuple[dict[str, Any], bool, str]:
        """The schema of a function that takes the text of a custom tool, whether it is strict, and what is said about
        the text. A regular expression is kept; there is no grammar for JSON whose texts have a grammar of Lark's."""
        text: dict[str, Any] = {"type": "string"}
        form = ""
        match self.tool.get("format"):
            case None | {"type": "text"}:
                pass
            case {"type": "grammar", "syntax": "regex", "definition": str(pattern)}:
                text["pattern"] = f"^(?:{pattern})$"
            case {"type": "grammar", "syntax": "lark", "definition": str(grammar)}:
                context.ignore(f"{self.place}.format", "the model is shown the grammar, and is not held to it.")
                form = f"The input has to follow this grammar (Lark):\n{grammar}"
            case _:
                where = f"{self.place}.format"
                message = f"{where} must be of type text, or a grammar with the syntax regex or lark."
                raise InvalidRequestError(message, param=where)
        schema = {"type": "object", "properties": {"input": text}, "required": ["input"]}
        return schema | {"additionalProperties": False}, "pattern" in text, form


def _flat(tools: Sequence[Mapping[str, Any]], context: RequestContext) -> list[_DeclaredTool]:
    inner = (tool["tools"] for tool in tools if isinstance(tool.get("tools"), list))
    if len(tools) + sum(map(len, inner)) > _MOST_TOOLS:
        raise InvalidRequestError(f"At most {_MOST_TOOLS} tools are allowed.", param="tools")
    flat: list[_DeclaredTool] = []
    for number, tool in enumerate(tools):
        place = f"tools[{number}]"
        if _type(tool, place) == "namespace":
            flat += _inner(tool, place, context)
        else:
            flat += _one(tool, place, context)
    return flat


def _inner(namespace: Mapping[str, Any], place: str, context: RequestContext) -> list[_DeclaredTool]:
    name, tools = _name(namespace, place), namespace.get("tools")
    if not isinstance(tools, list):
        raise InvalidRequestError(f"{place}.tools must be a list of tools.", param=f"{place}.tools")
    flat: list[_DeclaredTool] = []
    description = namespace.get("description")
    about = f"About {name}: {description}" if isinstance(description, str) and description else ""
    for number, tool in enumerate(tools):
        where = f"{place}.tools[{number}]"
        if not isinstance(tool, dict):
            raise InvalidRequestError(f"{where} must be an object.", param=where)
        flat += _one(tool, where, context, name, "" if flat else about)
    return flat


def _one(
    tool: Mapping[str, Any], place: str, context: RequestContext, namespace: str | None = None, about: str = ""
) -> tuple[_DeclaredTool, ...]:
    """Nothing for one that is left out."""
    kind = _type(tool, place)
    if kind not in ("function", "custom"):
        context.ignore(f"{place}.type", _NO_SUCH_TYPE)
        return ()
    if kind == "function" and namespace is None:
        return (_DeclaredTool(tool, place, None),)
    return (_DeclaredTool(tool, place, Callee(_name(tool, place), namespace, kind == "custom"), about),)


def _type(tool: Mapping[str, Any], place: str) -> str:
    kind = tool.get("type")
    if not isinstance(kind, str):
        raise InvalidRequestError(f"{place}.type is missing.", param=place)
    return kind


def _name(tool: Mapping[str, Any], place: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= _MOST_NAME_CHARS:
        message = f"{place}.name must have 1 to {_MOST_NAME_CHARS} characters."
        raise InvalidRequestError(message, param=f"{place}.name")
    return name


def _joined(namespace: str | None, name: str) -> str:
    """As clients without namespaces name the tools of MCP servers: mcp__files__read."""
    if namespace is None:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _names(tools: Sequence[_DeclaredTool]) -> list[str]:
    """Of the functions. Plain ones keep theirs; others with a name that is taken get a number behind it."""
    taken = {str(declared.tool.get("name")) for declared in tools if declared.callee is None}
    names = []
    last: dict[str, int] = {}
    for declared in tools:
        if declared.callee is None:
            names.append(str(declared.tool.get("name")))
            continue
        own = name = _joined(declared.callee.namespace, declared.callee.name)
        while name in taken:
            last[own] = last.get(own, 1) + 1
            name = f"{own}_{last[own]}"
        taken.add(name)
        names.append(name)
    return names


def _choice(
    choice: str | dict[str, Any] | None, by_callee: Mapping[Callee, str], context: RequestContext
) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    match choice:
        case {"type": "function" | "custom", "name": str()}:
            return _function_choice(_chosen(choice, by_callee))
        case {"type": "allowed_tools", "mode": str(mode), "tools": list(tools)} if len(tools) <= _MOST_TOOLS:
            return _allowed(mode, tools, by_callee, context)
        case {"type": str(kind)} if kind in _HOSTED:
            message = f"tool_choice: this server does not run {kind}."
            raise UnsupportedError(message, param="tool_choice")
    raise InvalidRequestError(
        "tool_choice must be none, auto, required, or of type function, custom or allowed_tools with the names of "
        "functions and custom tools.",
        param="tool_choice",
    )


def _allowed(
    mode: str, tools: Sequence[Any], by_callee: Mapping[Callee, str], context: RequestContext
) -> str | dict[str, Any]:
    names: dict[str, None] = {}
    namespaces: set[str] = set()
    for number, tool in enumerate(tools):
        match tool:
            case {"type": "function" | "custom", "name": str()}:
                names[_chosen(tool, by_callee)] = None
            case {"type": "namespace", "name": str(namespace)}:
                namespaces.add(namespace)
            case {"type": str(kind)} if kind not in ("function", "custom", "namespace"):
                context.ignore(f"tool_choice.tools[{number}].type", _NO_SUCH_TYPE)
            case _:
                message = "tool_choice.tools must be a list of tools, each with its type and name."
                raise InvalidRequestError(message, param="tool_choice")
    names |= {name: None for callee, name in by_callee.items() if callee.namespace in namespaces}
    if names:
        functions = [_function_choice(name) for name in names]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": functions}}
    if mode != "auto":
        raise UnsupportedError("tool_choice: this server runs none of the allowed tools.", param="tool_choice")
    return "none"


def _function_choice(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _chosen(tool: Mapping[str, Any], by_callee: Mapping[Callee, str]) -> str:
    """The function's name. One that is not there is for the chat front to refuse."""
    namespace = tool.get("namespace")
    callee = Callee(tool["name"], namespace if isinstance(namespace, str) else None, tool["type"] == "custom")
    return by_callee.get(callee, _joined(callee.namespace, callee.name))


_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_MOST_HEAD_CHARS = 256
_FIRST, _SECOND = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
"""The halves of a character that JSON writes in two."""
_ALONE = r"(?=[^\\]|\\[^u]|\\u(?:[^dD]|[dD][^c-fC-F]))"
_ESCAPED = rf"\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{{4}}|{_FIRST}(?:{_SECOND}|{_ALONE})"
_CHARS = re.compile(rf'(?:[^"\\]+|{_ESCAPED})*', re.DOTALL)
_LONGEST_ESCAPE = 12


class CustomInput:
    """Reads the text of a custom tool's call out of the arguments of its function, while they are being written."""

    def __init__(self) -> None:
        self._head: list[str] = []
        """What stands before the text."""
        self._head_chars = 0
        self._left = ""
        """What may be a part of a character."""
        self._inside = self._ended = False

    def read(self, piece: str) -> str:
        """What is new of the text."""
        if not self._inside:
            self._head.append(piece)
            self._head_chars += len(piece)
            head = _HEAD.match("".join(self._head)) if self._head_chars <= _MOST_HEAD_CHARS + len(piece) else None
            if head is None:
                return ""
            self._inside, piece = True, head.string[head.end() :]
        if self._ended:
            return ""
        left = self._left + piece
        chars = _CHARS.match(left)
        end = chars.end() if chars else 0
        self._left, self._ended = left[end:], left[end : end + 1] == '"'
        return _unescaped(left[:end])

    def rest(self) -> str:
        """At the end: what the model has written in another form than it was to, as it is."""
        if not self._inside:
            return _other_form("".join(self._head))
        return self._left if len(self._left) > _LONGEST_ESCAPE and not self._ended else ""


def _unescaped(text: str) -> str:
    try:
        unescaped: str = json.loads(f'"{text}"', strict=False)
    except ValueError:
        return text
    return unescaped.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _other_form(text: str) -> str:
    try:
        decoded = msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError):
        return text
    return decoded["input"] if isinstance(decoded, dict) and isinstance(decoded.get("input"), str) else text
