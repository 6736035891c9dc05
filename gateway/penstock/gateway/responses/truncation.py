"""`truncation: auto`: a conversation that does not fit into the model's context loses its oldest messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from penstock.gateway.generating.fitting import longest_that_fits, within
from penstock.gateway.llm.dataplane import GenerateRequest

_ANSWER_SHARE = 4
"""Of the context, a quarter is left to an answer without a bound, and no more to one that has."""

Messages = Sequence[dict[str, Any]]
Render = Callable[[Messages], Awaitable[GenerateRequest]]


async def truncated(messages: Messages, context_length: int, max_tokens: int | None, render: Render) -> GenerateRequest:
    """The request with as many of the last messages as leave room for the answer, whose bound is `max_tokens`; all of
    them where they do. System messages at the beginning and the user's last message stay. Raises what `render` does,
    and ContextLengthError where nothing more can go."""
    share = context_length // _ANSWER_SHARE
    whole = await within(context_length - min(max_tokens or 1, share), render(messages))
    starts = _starts(messages)
    if whole is not None or not starts:
        return whole or await render(messages)
    room = min(max_tokens or share, share)

    def shorter(start: int) -> Awaitable[GenerateRequest]:
        return render(_from(messages, start))

    found = await longest_that_fits(messages, starts, shorter, context_length - room)
    return found or await shorter(starts[-1])


def _starts(messages: Messages) -> list[int]:
    """Where a shorter conversation may begin: at a turn of the user, or, behind the user's last message, which stays,
    at a later turn of the assistant."""
    roles = [message["role"] for message in messages]
    head = next((number for number, role in enumerate(roles) if role != "system"), len(roles))
    users = [number for number, role in enumerate(roles) if role == "user"]
    last_user = users[-1] if users else len(roles)
    turns = [number for number in range(last_user + 2, len(roles)) if roles[number] == "assistant"]
    return [*(number for number in users if number > head), *turns]


def _from(messages: Messages, start: int) -> Messages:
    head = next((number for number, message in enumerate(messages) if message["role"] != "system"), len(messages))
    last_user = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=start)
    question = [messages[last_user]] if last_user < start else []
    return [*messages[:head], *question, *messages[start:]]
