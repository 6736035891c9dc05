"""Chats with models that other servers have, for the APIs that show answers in a form of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from penstock.gateway.http.exchange import Exchange
from penstock.gateway.llm.dataplane import ChoiceDelta, Usage


@dataclass(frozen=True, slots=True)
class OtherChat:
    """A chat request for another server."""

    fields: Mapping[str, Any]
    """Of OpenAI's chat API, without model and stream."""
    show_reasoning: bool = True


class OtherAnswer(Protocol):
    """Iterated as a Generation with one choice. The usage is complete with the delta that has the finish reason."""

    usage: Usage

    def __aiter__(self) -> AsyncIterator[list[ChoiceDelta]]: ...

    async def __anext__(self) -> list[ChoiceDelta]: ...


class OtherModel(Protocol):
    def chat(
        self, exchange: Exchange, chat: OtherChat, *, pulse: float | None
    ) -> AbstractAsyncContextManager[OtherAnswer | str]:
        """Gives the answer once it has begun, or the name of the model of this server that is to answer instead.
        `pulse`: seconds without anything to show after which the answer has an empty list. Raises PenstockError."""
        ...


def chat_fields(given: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`given` without what is None; `messages` are as chat templates know them. What the model thought in earlier turns
    is left out: some servers refuse it."""
    fields = {name: value for name, value in given.items() if value is not None}
    return fields | {"messages": [_message(each) for each in messages]}


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in given.items() if name != "reasoning_content"}
    if "tool_calls" in shown:
        shown["tool_calls"] = [_call(each) for each in shown["tool_calls"]]
    return shown


def _call(given: Mapping[str, Any]) -> dict[str, Any]:
    """Templates get arguments as an object, servers as JSON in a text."""
    function = given["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments).decode()
    return {**given, "function": {**function, "arguments": arguments}}
