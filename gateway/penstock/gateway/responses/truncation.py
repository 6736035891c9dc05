"""`truncation: auto`: a conversation that does not fit into the model's context loses its oldest messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from penstock.engines.errors import ContextLengthError
from penstock.gateway.llm.dataplane import GenerateRequest

_MOST_TRIES = 8
"""Each renders the template and encodes the text. Of a conversation of more than 64 turns, a few may go that would have
fitted."""
_ANSWER_SHARE = 4
"""Of the context, a quarter is left to an answer without a bound, and no more to one that has."""

Messages = Sequence[dict[str, Any]]
Render = Callable[[Messages], Awaitable[GenerateRequest]]


async def truncated(messages: Messages, context_length: int, max_tokens: int | None, render: Render) -> GenerateRequest:
    """The request with as many of the last messages as leave room for the answer, whose bound is `max_tokens`; all of
    them where they do. System messages at the beginning and the user's last message stay. Raises what `render` does,
    and ContextLengthError where nothing more can go."""
    share = context_length // _ANSWER_SHARE
    least = min(max_tokens or 1, share)

    async def fitting(kept: Messages, room: int) -> GenerateRequest | None:
        try:
            wanted = await render(kept)
        except ContextLengthError:
            return None
        return wanted if len(wanted.prompts[0]) + room <= context_length else None

    found = await fitting(messages, least)
    shorter = _Shorter(messages)
    if found is not None or not shorter.starts:
        return found or await render(messages)
    room = min(max_tokens or share, share)
    best = await fitting(shorter[-1], room)
    if best is None:
        return await render(shorter[-1])
    low, high = 0, len(shorter.starts) - 1
    for _ in range(_MOST_TRIES - 2):
        if low >= high:
            break
        middle = (low + high) // 2
        found = await fitting(shorter[middle], room)
        if found is None:
            low = middle + 1
        else:
            best, high = found, middle
    return best


class _Shorter:
    """The same conversation, from long to short: it begins with a turn of the user, or has the user's last message, and
    begins behind it with a later turn of the assistant."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        roles = [message["role"] for message in messages]
        self._head = next((number for number, role in enumerate(roles) if role != "system"), len(roles))
        users = [number for number, role in enumerate(roles) if role == "user"]
        self._last_user = users[-1] if users else len(roles)
        turns = [number for number in range(self._last_user + 2, len(roles)) if roles[number] == "assistant"]
        self.starts = [*(number for number in users if number > self._head), *turns]

    def __getitem__(self, number: int) -> Messages:
        start = self.starts[number]
        question = [self._messages[self._last_user]] if self._last_user < start else []
        return [*self._messages[: self._head], *question, *self._messages[start:]]
