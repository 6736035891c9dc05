"""Chats that are to be kept (`store`), as their front hands them over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from penstock.gateway.openai.other_chat import present
from penstock.gateway.openai.schemas import ChatMessage

ID_PREFIX = "chatcmpl"
"""Of what chats' answers are called."""


@dataclass(frozen=True, slots=True)
class StoredChat:
    id: str
    model: str
    completion: bytes
    """JSON of the answer, without metadata."""
    messages: bytes
    """JSON of `shown_messages`."""
    metadata: Mapping[str, str]


class ChatKeeper(Protocol):
    @property
    def enabled(self) -> bool:
        """False: nothing is kept."""
        ...

    def keep(self, tenant: str, chat: StoredChat) -> object:
        """Does not wait."""
        ...


def shown_messages(chat_id: str, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The request's messages as OpenAI shows those of a stored chat: with ids, and parts apart from texts."""
    return [_shown(f"{chat_id}-{number}", message) for number, message in enumerate(messages)]


def _shown(message_id: str, message: ChatMessage) -> dict[str, Any]:
    given = present(msgspec.to_builtins(message))
    content = given.pop("content", None)
    if "tool_calls" in given:
        given["tool_calls"] = [present(call) for call in given["tool_calls"]]
    in_parts = isinstance(content, list)
    contents = {"content": None if in_parts else content, "content_parts": content if in_parts else None}
    return {"id": message_id, "name": None, **given, **contents}
