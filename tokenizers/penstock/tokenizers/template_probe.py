"""Probe of a chat template: short conversations, rendered once, show which forms of messages it insists on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from .messages import NO_NEEDS, ContentFormat, Messages, TemplateNeeds, normalize_messages

Write = Callable[[Messages, list[dict[str, Any]] | None], str]
"""Renders messages and tools. Raises what the template raises."""

_SHORT_CALL_ID = "a1b2c3d4e"
_CALL_ID = "call_0123456789abcdef01234567"
_END = "0qx"
_NAME, _KEY, _VALUE = _CALL = (f"name{_END}", f"key{_END}", f"value{_END}")
"""Words that no template has."""
_SPOILED = (f"{{'{_KEY}", f"'{{\"{_KEY}", f'{{\\"{_KEY}')
"""An object as Python shows it; JSON inside of a string, as Python and JSON show it."""
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "tool",
            "description": "a tool",
            "parameters": {
                "type": "object",
                "properties": {"p": {"type": "string", "description": "p"}},
                "required": [],
            },
        },
    }
]
_CALL_FORMS: tuple[Mapping[str, bool], ...] = tuple(
    {**arguments, **content}
    for content in ({}, {"none_content": True}, {"absent_content": True})
    for arguments in ({}, {"text_arguments": True})
)


def find_needs(
    write: Write, content_format: ContentFormat, *, fixed_format: bool, shows_calls: bool, with_tools: bool
) -> TemplateNeeds:
    """`fixed_format`: the operator has said so. `shows_calls`: the template may show calls of earlier messages.
    `with_tools`: it is for chats with tools only.

    Each need is a fact: the template refused a conversation, or left a text of it out, and did neither once the
    messages had another form. Raises no Exception.
    """
    probe = _Probe(write, content_format, with_tools)
    parts = {"content_parts": True} if content_format == "openai" else {}
    if not probe.settle([_user(1)], parts):
        probe = _Probe(write, content_format, with_tools=True)  # some take nothing else, whatever they are called
        if not probe.settle([_user(1)], parts):
            return NO_NEEDS
    if parts and not fixed_format:
        content = [{"type": "text", "text": _user(1)["content"]}]
        probe.settle([{"role": "user", "content": content}], {"content_text": True}, never=("{'type'",))
    probe.settle([_system(1), _user(1)], parts, {"no_system": True})
    if shows_calls:
        _find_forms_of_calls(probe, [*_CALL_FORMS, *({**form, **parts} for form in _CALL_FORMS if parts)])
    _find_order_of_turns(probe)
    return probe.needs


def writes_any_role(write: Write, content_format: ContentFormat, needs: TemplateNeeds, *, with_tools: bool) -> bool:
    """Whether a message of a role that no template knows is shown as one of that role. Raises no Exception."""
    role, text = f"role{_END}", f"other{_END}"
    messages = [_user(1), {"role": role, "content": text}]
    output = _Probe(write, content_format, with_tools).output(messages, needs, tools=False)
    return role in output.partition(text)[0] and text in output


class _Probe:
    def __init__(self, write: Write, content_format: ContentFormat, with_tools: bool) -> None:
        self.needs = NO_NEEDS
        self._write = write
        self._format = content_format
        self._with_tools = with_tools

    def settle(
        self,
        messages: Messages,
        *changes: Mapping[str, bool],
        called: tuple[str, ...] = (),
        never: tuple[str, ...] = (),
    ) -> bool:
        """Adds the first of the changes with which the conversation is shown, and none if it is shown without. False if
        it is not shown with any."""
        texts = [*called, *_texts(messages)]
        for change in ({}, *changes):
            needs = replace(self.needs, **change)
            output = self.output(messages, needs, tools=bool(called))
            if all(text in output for text in texts) and not any(text in output for text in never):
                self.needs = needs
                return True
        return False

    def output(self, messages: Messages, needs: TemplateNeeds, *, tools: bool) -> str:
        """Empty if the template refuses the messages or fails."""
        try:
            shaped = normalize_messages(messages, self._format, needs)
            return self._write(shaped, _TOOLS if tools or self._with_tools else None)
        except Exception:  # of any kind: templates raise what Python raises
            return ""


def _texts(messages: Messages) -> list[str]:
    """Those that no template has, and that each must show."""
    contents = (message["content"] for message in messages)
    texts = (content if isinstance(content, str) else content[0]["text"] for content in contents)
    return [text for text in texts if text.endswith(_END)]


def _find_forms_of_calls(probe: _Probe, forms: list[Mapping[str, bool]]) -> None:
    chat = [_user(1), _calls(_SHORT_CALL_ID), {**_result(_SHORT_CALL_ID), "name": _NAME}]
    arguments = (_KEY, _VALUE)
    if not (
        probe.settle(chat, *forms, called=arguments, never=_SPOILED) or probe.settle(chat, *forms, called=arguments)
    ):
        return
    probe.settle(
        [_user(1), _calls(_CALL_ID), _result(_CALL_ID)],
        {"short_call_ids": True},
        {"named_call_ids": True},
        {"tool_names": True},
        {"short_call_ids": True, "tool_names": True},
        called=_CALL,
    )
    # Many templates leave out the text beside calls on purpose, but none the calls beside a text.
    probe.settle([_user(1), _calls(_CALL_ID, "text"), _result(_CALL_ID)], {"calls_apart": True}, called=_CALL)
    both, other_id, other = _calls(_CALL_ID), _CALL_ID[::-1], f"other{_END}"
    both["tool_calls"] += _calls(other_id, name=other)["tool_calls"]
    probe.settle(
        [_user(1), both, _result(_CALL_ID), _result(other_id)],
        {"single_calls": True},
        called=(*_CALL, other),
    )
    called = [_calls(_CALL_ID), _result(_CALL_ID)]
    probe.settle([_user(1), _assistant(1), *called], {"joined_calls": True}, called=_CALL)
    probe.settle([_user(1), *called, _user(2)], {"turns_around_calls": True}, called=_CALL)


def _find_order_of_turns(probe: _Probe) -> None:
    probe.settle([_user(1), _user(2)], {"joined_users": True})
    probe.settle([_user(1), _assistant(1), _assistant(2), _user(2)], {"joined_assistants": True})
    probe.settle([_system(1), _system(2), _user(1)], {"joined_systems": True})
    late = [_system(1), _user(1), _system(2), _assistant(1), _system(3), _user(2)]
    probe.settle(late, {"late_system_as_user": True})
    probe.settle([_assistant(1), _user(1)], {"user_first": True})
    probe.settle([_system(1)], {"some_user": True})


def _system(number: int) -> dict[str, Any]:
    return {"role": "system", "content": f"system{number}{_END}"}


def _user(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"user{number}{_END}"}


def _assistant(number: int) -> dict[str, Any]:
    return {"role": "assistant", "content": f"assistant{number}{_END}"}


def _calls(call_id: str, content: str = "", name: str = _NAME) -> dict[str, Any]:
    function = {"name": name, "arguments": {_KEY: _VALUE}}
    calls = [{"id": call_id, "type": "function", "function": function}]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def _result(call_id: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": "result"}
