"""Items as chat templates know them: messages, in which what the assistant has thought, said and called is one turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.front.context import RequestContext
from penstock.gateway.openai.messages import history_arguments
from penstock.gateway.responses.items import content_text
from penstock.gateway.responses.schemas import InputItem


def template_messages(
    instructions: str | None,
    earlier: Sequence[InputItem],
    given: Sequence[InputItem],
    context: RequestContext,
    before: str = "previous_response_id",
) -> list[dict[str, Any]]:
    """`earlier` are the items before this request's, which its field `before` names. Raises InvalidRequestError for
    calls and outputs that do not belong together."""
    conversation = _Conversation(instructions, context)
    for item in earlier:
        conversation.add(item, before)
    for number, item in enumerate(given):
        conversation.add(item, f"input[{number}]")
    if conversation.unanswered:
        where = next(iter(conversation.unanswered.values()))
        raise InvalidRequestError(f"{where}: a function_call has no function_call_output.", param=where)
    return [_joined(message) for message in conversation.messages]


_TEXTS = ("content", "reasoning_content")


class _Conversation:
    def __init__(self, instructions: str | None, context: RequestContext) -> None:
        self._context = context
        self.messages: list[dict[str, Any]] = []
        """Each text as a list of its pieces: there may be very many, and each `+` would copy all before it."""
        self.unanswered: dict[str, str] = {}
        """Ids of calls, each with its place in the request."""
        self._called: set[str] = set()
        if instructions:
            self._add_system(instructions)

    def add(self, item: InputItem, where: str) -> None:
        match item.type:
            case "function_call":
                self._add_call(item, where)
            case "function_call_output":
                self._add_output(item, where)
            case "reasoning":
                self._extend("reasoning_content", content_text(item.content))
            case _:
                self._add_message(item)

    def _add_message(self, item: InputItem) -> None:
        text = content_text(item.content)
        match item.role:
            case "assistant":
                self._extend("content", text)
            case "user":
                self.messages.append({"role": "user", "content": [text]})
            case _:
                self._add_system(text)

    def _add_system(self, text: str) -> None:
        """Many templates take one system message at most, so that those behind each other are one."""
        if self.messages and self.messages[-1]["role"] == "system":
            self.messages[-1]["content"].append(text)
        else:
            self.messages.append({"role": "system", "content": [text]})

    def _add_call(self, item: InputItem, where: str) -> None:
        function = {
            "name": item.name,
            "arguments": history_arguments(item.arguments, f"{where}.arguments", self._context),
        }
        call_id = item.call_id or ""
        self._turn().setdefault("tool_calls", []).append({"id": call_id, "type": "function", "function": function})
        self._called.add(call_id)
        self.unanswered[call_id] = where

    def _add_output(self, item: InputItem, where: str) -> None:
        call_id = item.call_id or ""
        if call_id not in self._called:
            param = f"{where}.call_id"
            raise InvalidRequestError(f"{param} names no function_call before it.", param=param)
        self.unanswered.pop(call_id, None)
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": [content_text(item.output)]})

    def _extend(self, field: str, text: str) -> None:
        turn = self._turn()
        if text:
            turn.setdefault(field, []).append(text)

    def _turn(self) -> dict[str, Any]:
        """The assistant's, which is the last message."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": []})
        return self.messages[-1]


def _joined(message: dict[str, Any]) -> dict[str, Any]:
    between = "\n" if message["role"] == "system" else ""
    return {name: between.join(value) if name in _TEXTS else value for name, value in message.items()}
