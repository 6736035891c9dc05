"""Chat messages as clients send them, made into what chat templates read."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError

from .environment import ChatEnvironment
from .errors import ChatTemplateError

ContentFormat = Literal["string", "openai"]


def content_format(source: str) -> ContentFormat:
    """`openai` when the template loops over a message's `content`, directly or by way of variables and macros.

    Raises ChatTemplateError when `source` is not valid Jinja.
    """
    try:
        tree = ChatEnvironment().parse(source)
    except TemplateSyntaxError as error:
        message = f"the chat template is not valid Jinja: line {error.lineno}: {error.message}"
        raise ChatTemplateError(message) from None
    except RecursionError:
        raise ChatTemplateError("the chat template is nested too deeply") from None
    names = _names_of_content(tree)
    loops = tree.find_all(nodes.For)
    return "openai" if any(_is_content(loop.iter, names) for loop in loops) else "string"


def _names_of_content(tree: nodes.Template) -> set[str]:
    """Variables that are assigned a message's content, and macro parameters that receive it."""
    macros = {macro.name: macro for macro in tree.find_all(nodes.Macro)}
    names: set[str] = set()
    while True:
        more = set(names)
        for assign in tree.find_all(nodes.Assign):
            if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
                more.add(assign.target.name)
        for call in tree.find_all(nodes.Call):
            macro = macros.get(call.node.name) if isinstance(call.node, nodes.Name) else None
            for parameter, argument in zip(macro.args if macro else (), call.args, strict=False):
                if _is_content(argument, names):
                    more.add(parameter.name)
        if more == names:
            return names
        names = more


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    match node:
        case nodes.Name(name=name):
            return name in names
        case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
            return True
        case nodes.Getitem(node=inner, arg=nodes.Slice()):
            return _is_content(inner, names)
        case nodes.Filter(node=inner) if inner is not None:
            return _is_content(inner, names)
        case nodes.CondExpr(expr1=first, expr2=second):
            return _is_content(first, names) or (second is not None and _is_content(second, names))
    return False


Messages = list[dict[str, Any]]

_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING = ("reasoning_content", "reasoning", "thinking")
"""Names under which clients send an assistant's reasoning; templates read the first, those of gpt-oss the last."""
_BETWEEN = "\n\n"
"""Between the texts of messages that become one."""
_OTHER_SIDE = {"user": "assistant", "assistant": "user"}
_SHORT_ID = 9
"""Characters of a call's id in the templates of Mistral's models."""


def _need(text: str) -> bool:
    need: bool = field(default=False, metadata={"text": text})
    return need


@dataclass(frozen=True, slots=True)
class TemplateNeeds:
    """The forms of messages that a chat template insists on. Without needs it gets messages as clients send them."""

    content_text: bool = _need("content as text")
    content_parts: bool = _need("content as a list of parts")
    text_arguments: bool = _need("the arguments of calls as text")
    none_content: bool = _need("None as the content beside calls")
    absent_content: bool = _need("no content beside calls")
    short_call_ids: bool = _need("ids of calls with 9 letters and digits")
    named_call_ids: bool = _need("ids of calls with the function's name")
    tool_names: bool = _need("the tool's name in each result")
    calls_apart: bool = _need("text and calls in messages of their own")
    single_calls: bool = _need("one call in each message")
    no_system: bool = _need("no system message, so the user's messages get its text")
    joined_systems: bool = _need("one system message at the start")
    late_system_as_user: bool = _need("no system message later on, so the user's messages get its text")
    joined_users: bool = _need("one user message at a time")
    joined_assistants: bool = _need("one assistant message at a time")
    joined_calls: bool = _need("calls in the assistant message before them")
    user_first: bool = _need("a user message at the start")
    some_user: bool = _need("at least one user message")
    turns_around_calls: bool = _need("user and assistant messages by turns, whatever calls are between them")

    def __str__(self) -> str:
        """In words; empty without needs."""
        return "; ".join(need.metadata["text"] for need in fields(self) if getattr(self, need.name))


NO_NEEDS = TemplateNeeds()


def normalize_messages(
    messages: Sequence[Mapping[str, Any]], content_format: ContentFormat = "string", needs: TemplateNeeds = NO_NEEDS
) -> Messages:
    """New messages; the ones given are left as they are.

    Keys without a value are dropped, and empty content beside calls is "". Tool calls' arguments become objects where
    they are JSON. With `string`, content parts are joined by newlines; with `openai` they stay. What else changes, the
    needs say: no text is lost, and none gets a role of more authority than its sender had. Raises ChatTemplateError for
    messages of another shape.
    """
    if needs.content_text:
        content_format = "string"
    shaped = [_normalize(f"messages[{n}]", message, content_format, needs) for n, message in enumerate(messages)]
    return shaped if needs == NO_NEEDS else _rearranged(shaped, needs)


def _normalize(where: str, message: object, content_format: ContentFormat, needs: TemplateNeeds) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ChatTemplateError(f"{where} must be an object")
    result = {key: value for key, value in message.items() if value is not None}
    if not isinstance(result.get("role"), str):
        raise ChatTemplateError(f"{where} has no role")
    if "content" in result:
        result["content"] = _content(f"{where}.content", result["content"], content_format)
    if "tool_calls" in result:
        result["tool_calls"] = _tool_calls(f"{where}.tool_calls", result["tool_calls"], needs)
        _set_empty_content(result, needs)
    if needs.short_call_ids and "tool_call_id" in result:
        result["tool_call_id"] = _short_id(result["tool_call_id"])
    reasoning = next((result[name] for name in _REASONING if name in result), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    return result


def _content(where: str, content: object, content_format: ContentFormat) -> Any:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise ChatTemplateError(f"{where} must be a string or a list of parts")
    parts = [_part(f"{where}[{n}]", part) for n, part in enumerate(content)]
    if content_format == "openai":
        return parts
    for n, part in enumerate(parts):
        if part["type"] != "text":
            raise ChatTemplateError(f"{where}[{n}]: this model takes no content of type {part['type']!r}")
    return "\n".join(part["text"] for part in parts)


def _part(where: str, part: object) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise ChatTemplateError(f"{where} must be an object with a type")
    if part["type"] in _TEXT_PARTS or part["type"] == "refusal":
        text = part.get("refusal" if part["type"] == "refusal" else "text")
        if not isinstance(text, str):
            raise ChatTemplateError(f"{where} has no text")
        return {"type": "text", "text": text}
    return {key: value for key, value in part.items() if value is not None}


def _tool_calls(where: str, calls: object, needs: TemplateNeeds) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise ChatTemplateError(f"{where} must be a list")
    return [_tool_call(f"{where}[{n}]", call, needs) for n, call in enumerate(calls)]


def _tool_call(where: str, call: object, needs: TemplateNeeds) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise ChatTemplateError(f"{where} must be an object")
    result = {key: value for key, value in call.items() if value is not None}
    if needs.short_call_ids and "id" in result:
        result["id"] = _short_id(result["id"])
    function = result.get("function")
    if isinstance(function, Mapping):
        form = _arguments_text if needs.text_arguments else _arguments
        result["function"] = {**function, "arguments": form(function.get("arguments"))}
    return result


def _arguments(arguments: object) -> object:
    """What is no JSON object stays as the model wrote it: it is for the template to accept or refuse."""
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _arguments_text(arguments: object) -> str:
    if isinstance(arguments, str) and arguments.strip():
        return arguments
    try:
        return json.dumps(arguments or {}, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise ChatTemplateError("the arguments of a call must be a JSON object") from None


def _set_empty_content(message: dict[str, Any], needs: TemplateNeeds) -> None:
    """Of a message with calls."""
    if message.get("content") or not message["tool_calls"]:
        return
    if needs.absent_content:
        message.pop("content", None)
    elif needs.none_content:
        message["content"] = None
    else:
        message.setdefault("content", "")


def _short_id(value: object) -> str:
    """Always the same for one id, so that calls and their results still fit each other."""
    text = str(value)
    if len(text) == _SHORT_ID and text.isascii() and text.isalnum():
        return text
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_SHORT_ID]


def _rearranged(messages: Messages, needs: TemplateNeeds) -> Messages:
    if needs.named_call_ids:
        messages = _with_named_ids(messages)
    if needs.tool_names:
        messages = _with_tool_names(messages)
    if needs.single_calls:
        messages = _calls_one_by_one(messages, needs)
    if needs.calls_apart:
        messages = [part for message in messages for part in _text_and_calls(message, needs)]
    messages = _with_missing_turns(_joined_neighbours(_placed_systems(messages, needs), needs), needs)
    if needs.content_parts:
        messages = [_with_content_parts(message) for message in messages]
    return messages


def _with_named_ids(messages: Messages) -> Messages:
    """As Kimi's models write them, whose templates show nothing else of a call's function."""
    ids: dict[str, str] = {}
    result: Messages = []
    number = 0
    for message in messages:
        message = dict(message)
        if message.get("tool_calls"):
            calls = [{**call, "id": _named_id(call, n)} for n, call in enumerate(message["tool_calls"], number)]
            ids |= {str(old.get("id")): new["id"] for old, new in zip(message["tool_calls"], calls, strict=True)}
            message["tool_calls"] = calls
            number += len(calls)
        if "tool_call_id" in message:
            call_id = str(message["tool_call_id"])
            message["tool_call_id"] = ids.get(call_id, call_id)
        result.append(message)
    return result


def _named_id(call: Mapping[str, Any], number: int) -> str:
    prefix = f"functions.{_function_name(call)}:"
    own = str(call.get("id"))
    return own if own.startswith(prefix) else f"{prefix}{number}"


def _with_tool_names(messages: Messages) -> Messages:
    names: dict[Any, Any] = {}
    result = []
    for message in messages:
        names |= {str(call.get("id")): _function_name(call) for call in message.get("tool_calls", ())}
        name = names.get(str(message.get("tool_call_id")))
        unnamed = message["role"] == "tool" and "name" not in message and name is not None
        result.append({**message, "name": name} if unnamed else message)
    return result


def _function_name(call: Mapping[str, Any]) -> Any:
    function = call.get("function")
    return function.get("name") if isinstance(function, Mapping) else None


def _calls_one_by_one(messages: Messages, needs: TemplateNeeds) -> Messages:
    """Each call is followed by its own results."""
    result: Messages = []
    place = 0
    while place < len(messages):
        message, behind = messages[place], place + 1
        place = behind
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            result.append(message)
            continue
        while place < len(messages) and messages[place]["role"] == "tool":
            place += 1
        result += _one_by_one(message, messages[behind:place], needs)
    return result


def _one_by_one(message: dict[str, Any], answers: Messages, needs: TemplateNeeds) -> Messages:
    by_id: dict[str, Messages] = defaultdict(list)
    for answer in answers:
        by_id[str(answer.get("tool_call_id"))].append(answer)
    result: Messages = []
    for call in message["tool_calls"]:
        opening = _only_calls([call], needs) if result else {**message, "tool_calls": [call]}
        result += [opening, *by_id.pop(str(call.get("id")), ())]
    return [*result, *(answer for rest in by_id.values() for answer in rest)]


def _only_calls(calls: list[dict[str, Any]], needs: TemplateNeeds) -> dict[str, Any]:
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    _set_empty_content(message, needs)
    return message


def _text_and_calls(message: dict[str, Any], needs: TemplateNeeds) -> Messages:
    calls = message.get("tool_calls")
    if not calls or not message.get("content"):
        return [message]
    return [{key: value for key, value in message.items() if key != "tool_calls"}, _only_calls(calls, needs)]


def _placed_systems(messages: Messages, needs: TemplateNeeds) -> Messages:
    leading = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if needs.no_system:
        leading = 0
    opening, rest = messages[:leading], messages[leading:]
    if needs.joined_systems and len(opening) > 1:
        opening = [_joined(opening)]
    return opening + (_systems_as_user(rest) if needs.no_system or needs.late_system_as_user else rest)


def _systems_as_user(messages: Messages) -> Messages:
    """The text of system messages is at the start of the user message behind them, else in one of its own."""
    result: Messages = []
    waiting: Messages = []
    for message in messages:
        if message["role"] == "system":
            waiting.append({**message, "role": "user"})
            continue
        if waiting and message["role"] == "user":
            message = _joined([*waiting, message])
        elif waiting:
            result.append(_joined(waiting))
        waiting = []
        result.append(message)
    return [*result, _joined(waiting)] if waiting else result


def _joined_neighbours(messages: Messages, needs: TemplateNeeds) -> Messages:
    turns: list[Messages] = []
    for message in messages:
        if turns and _are_joined(turns[-1][-1], message, needs):
            turns[-1].append(message)
        else:
            turns.append([message])
    return [_joined(turn) for turn in turns]


def _are_joined(first: Mapping[str, Any], second: Mapping[str, Any], needs: TemplateNeeds) -> bool:
    if first["role"] != second["role"] or first.get("tool_calls"):
        return False
    if first["role"] == "user":
        return needs.joined_users
    return first["role"] == "assistant" and (
        needs.joined_calls if second.get("tool_calls") else needs.joined_assistants
    )


def _joined(turn: Messages) -> dict[str, Any]:
    """One message. All are joined at once: a body can hold very many, and each `+` would copy all before it."""
    if len(turn) == 1:
        return turn[0]
    first, *rest = turn
    joined = {key: value for key, value in first.items() if all(other.get(key) == value for other in rest)}
    joined["content"] = _joined_content([message["content"] for message in turn if message.get("content")])
    for name in _REASONING:
        texts = [message[name] for message in turn if message.get(name)]
        if texts:
            joined[name] = texts[0] if len(texts) == 1 else _BETWEEN.join(map(str, texts))
    calls = [call for message in turn for call in message.get("tool_calls", ())]
    return {**joined, "tool_calls": calls} if calls else joined


def _joined_content(contents: list[Any]) -> str | list[dict[str, Any]]:
    """A text, unless there are parts of another kind: templates often trim the parts, or put nothing between them."""
    lists = [_parts(content) for content in contents]
    if all(part["type"] == "text" for parts in lists for part in parts):
        return _BETWEEN.join("\n".join(part["text"] for part in parts) for parts in lists)
    between = {"type": "text", "text": _BETWEEN}
    return [part for n, parts in enumerate(lists) for part in ([between, *parts] if n else parts)]


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _with_missing_turns(messages: Messages, needs: TemplateNeeds) -> Messages:
    """Turns that a template cannot do without are there, empty."""
    no_user = needs.some_user and all(message["role"] != "user" for message in messages)
    result: Messages = []
    opened, spoken, behind_calls = False, "", False
    for message in messages:
        role = message["role"]
        if not opened and role != "system":
            opened = True
            if no_user or (needs.user_first and role != "user"):
                result.append({"role": "user", "content": ""})
                spoken = "user"
        if role == "tool" or message.get("tool_calls"):
            behind_calls = True
        elif role in _OTHER_SIDE:
            if needs.turns_around_calls and behind_calls and role == spoken:
                result.append({"role": _OTHER_SIDE[role], "content": ""})
            spoken, behind_calls = role, False
        result.append(message)
    return result if opened or not no_user else [*result, {"role": "user", "content": ""}]


def _with_content_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": _parts(content)} if isinstance(content, str) else message
