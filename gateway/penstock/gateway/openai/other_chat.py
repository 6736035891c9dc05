"""A chat for a model of another server, made from a request of another API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from penstock.gateway.generating.other_chats import OtherChat, chat_fields
from penstock.gateway.openai.schemas import ChatRequest


def other_chat(request: ChatRequest, messages: Sequence[Mapping[str, Any]]) -> OtherChat:
    """`messages` are as chat templates know them; those of `request` are not read."""
    fields = msgspec.to_builtins(request)
    shows = fields.pop("include_reasoning") is not False
    most = fields.pop("max_completion_tokens")
    if most is not None:
        fields["max_tokens"] = most  # more servers know it by this name
    if request.response_format is not None:
        form = present(fields["response_format"])
        if "json_schema" in form:
            form["json_schema"] = present(form["json_schema"])
        fields["response_format"] = form
    return OtherChat(chat_fields(fields, messages), show_reasoning=shows)


def present(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Those that have a value."""
    return {name: value for name, value in fields.items() if value is not None}
