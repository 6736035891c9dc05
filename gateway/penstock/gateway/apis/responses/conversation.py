"""Items as chat templates know them: messages, in which what the assistant has thought, said and called is one turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from penstock.gateway.apis.openai.messages import history_arguments
from penstock.gateway.apis.responses.items import content_text, image_of_part
from penstock.gateway.apis.responses.schemas import InputItem, ResponseContentPart
from penstock.gateway.apis.responses.tools import ResponseTools
from penstock.gateway.requests.context import RequestContext


def template_messages(
    instructions: str | None,
    earlier: Sequence[InputItem],
    items: Sequence[InputItem],
    tools: ResponseTools,
    context: RequestContext,
    before: str = "previous_response_id",
    *,
    reads_images: bool = False,
) -> list[dict[str, Any]]:
    """`earlier` are the items before this request's, which its field `before` names. Templates need calls and outputs
    that belong together: for one that is alone the other one is added, and `context` notes it."""
    conversation = _Conversation(instructions, tools, context, _shown if reads_images else _text_alone)
    for item in earlier:
        conversation.add(item, before)
    for number, item in enumerate(items):
        conversation.add(item, f"input[{number}]")
    return [_joined(message) for message in conversation.answered()]


_TEXTS = ("content", "reasoning_content")
_NO_OUTPUT = "(no output)"
_UNNAMED = "unknown"
"""The function of a call that is not there."""


class _Conversation:
    def __init__(
        self, instructions: str | None, tools: ResponseTools, context: RequestContext, show: ShowContent
    ) -> None:
        self._show = show
        self._tools = tools
        self._context = context
        self.messages: list[dict[str, Any]] = []
        """Each text as a list of its pieces: there may be very many, and each `+` would copy all before it."""
        self._unanswered: dict[str, str] = {}
        """Ids of calls, each with its place in the request."""
        self._called: set[str] = set()
        if instructions:
            self._add_system(instructions)

    def add(self, item: InputItem, where: str) -> None:
        match item.type:
            case "function_call" | "custom_tool_call":
                self._add_call(item, where)
            case "function_call_output" | "custom_tool_call_output":
                self._add_output(item, where)
            case "reasoning":
                self._extend("reasoning_content", content_text(item.content))
            case _:
                self._add_message(item, where)

    def _add_message(self, item: InputItem, where: str) -> None:
        match item.role:
            case "assistant":
                self._extend("content", content_text(item.content))
            case "user":
                self.messages.append({"role": "user", "content": self._show(item.content, where)})
            case _:
                self._add_system(content_text(item.content))

    def _add_system(self, text: str) -> None:
        """Many templates take one system message at most, so that those behind each other are one."""
        if self.messages and self.messages[-1]["role"] == "system":
            self.messages[-1]["content"].append(text)
        else:
            self.messages.append({"role": "system", "content": [text]})

    def _add_call(self, item: InputItem, where: str) -> None:
        if item.type == "custom_tool_call":
            arguments = msgspec.json.encode({"input": item.input or ""}).decode()
        else:
            arguments = history_arguments(item.arguments, f"{where}.arguments", self._context)
        call_id = item.call_id or ""
        self._append_call(call_id, self._tools.function_name(item), arguments)
        self._unanswered[call_id] = where

    def _append_call(self, call_id: str, name: str, arguments: str) -> None:
        function = {"name": name, "arguments": arguments}
        self._turn().setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        self._called.add(call_id)

    def _add_output(self, item: InputItem, where: str) -> None:
        call_id = item.call_id or ""
        if call_id not in self._called:
            self._context.ignore(f"{where}.call_id", "there is no such call before this output.")
            self._append_call(call_id, self._tools.function_name(item) or _UNNAMED, "{}")
        self._unanswered.pop(call_id, None)
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": self._show(item.output, where)})

    def answered(self) -> list[dict[str, Any]]:
        """The messages, in which each call has an output."""
        if not self._unanswered:
            return self.messages
        for where in self._unanswered.values():
            self._context.ignore(f"{where}.call_id", "this call has no output.")
        messages: list[dict[str, Any]] = []
        open_ids: list[str] = []
        for number, message in enumerate(self.messages):
            messages.append(message)
            following = self.messages[number + 1 : number + 2]
            open_ids += [call["id"] for call in message.get("tool_calls", ()) if call["id"] in self._unanswered]
            if not following or following[0]["role"] != "tool":
                messages += [{"role": "tool", "tool_call_id": call_id, "content": [_NO_OUTPUT]} for call_id in open_ids]
                open_ids = []
        return messages

    def _extend(self, field: str, text: str) -> None:
        turn = self._turn()
        if text:
            turn.setdefault(field, []).append(text)

    def _turn(self) -> dict[str, Any]:
        """The assistant's, which is the last message."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": []})
        return self.messages[-1]


Content = str | Sequence[ResponseContentPart] | None
ShowContent = Callable[[Content, str], list[Any]]
"""Of a content and its item's place: the pieces of what the model reads."""


def _text_alone(content: Content, where: str) -> list[Any]:
    return [content_text(content)]


def _shown(content: Content, where: str) -> list[Any]:
    """Parts, where there are images between texts."""
    if content is None or isinstance(content, str) or not any(part.is_image for part in content):
        return _text_alone(content, where)
    return [_part(part, f"{where}.content[{number}]") for number, part in enumerate(content)]


def _part(part: ResponseContentPart, where: str) -> dict[str, Any]:
    if part.is_image:
        return {"type": "image", "image": image_of_part(part, where)}
    return {"type": "text", "text": part.text or ""}


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    between = "\n" if message["role"] == "system" else ""
    return {
        name: between.join(value) if name in _TEXTS and all(isinstance(piece, str) for piece in value) else value
        for name, value in message.items()
    }
