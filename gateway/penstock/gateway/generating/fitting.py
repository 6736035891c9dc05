"""Conversations that are too long for a context: what is the longest end of one that fits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.engines.errors import ContextLengthError
from penstock.gateway.models.language.dataplane import GenerateRequest

Messages = Sequence[Mapping[str, Any]]
Render = Callable[[int], Awaitable[GenerateRequest]]
"""The request with the prompt of the conversation that begins at this message. Raises PenstockError, and
ContextLengthError for a prompt that is longer than the context."""

_TRIES = 8
"""Renderings of a conversation that is too long. Three or four find the place."""
_CHARS_OF_A_TOKEN = 3.0
_CHARS_OF_A_MESSAGE = 16
"""That a template writes around each."""
_CHARS_OF_AN_IMAGE = 3000
"""As long as the text of so many tokens."""


def only_prompt(request: GenerateRequest) -> list[int]:
    """Of a chat, which is tokens by now."""
    [prompt] = request.prompts
    return list(prompt) if isinstance(prompt, list) else []


async def within(most: int, rendered: Awaitable[GenerateRequest]) -> GenerateRequest | None:
    """The request, if its prompt has no more tokens. Raises PenstockError."""
    try:
        request = await rendered
    except ContextLengthError:
        return None
    return request if len(only_prompt(request)) <= most else None


async def longest_that_fits(
    messages: Messages, starts: Sequence[int], render: Render, most: int
) -> GenerateRequest | None:
    """Of the conversations that begin at one of `starts`, with the system's messages before it, the longest one of at
    most `most` tokens, or one that is almost as long; None: there is none. Each look renders and encodes a
    conversation, so it is guessed from the messages' lengths where to look, and what was seen makes the next guess
    better."""
    lengths = _lengths(messages, starts)
    best: GenerateRequest | None = None
    too_early, fits = -1, len(starts)
    chars_of_a_token = _CHARS_OF_A_TOKEN
    for tries_left in reversed(range(_TRIES)):
        if fits - too_early <= 1:
            break
        guess = bisect_left(lengths, -most * chars_of_a_token)
        if best is None and not tries_left:
            guess = len(starts)
        place = min(max(guess, too_early + 1), fits - 1)
        request = await within(most, render(starts[place]))
        if request is None:
            too_early, chars_of_a_token = place, chars_of_a_token * 0.7
        else:
            best, fits = request, place
            chars_of_a_token = -lengths[place] / len(only_prompt(request))
    return best


def _lengths(messages: Messages, starts: Sequence[int]) -> list[int]:
    """Characters of the conversation from each start on, negative, so that they ascend."""
    total = sum(_length(message) for message in messages if message["role"] == "system")
    lengths: list[int] = []
    end = len(messages)
    for start in reversed(starts):
        total += sum(_length(message) for message in messages[start:end] if message["role"] != "system")
        lengths.append(-total)
        end = start
    return lengths[::-1]


def _length(message: Mapping[str, Any]) -> int:
    calls = message.get("tool_calls")
    extra = 0 if calls is None else len(msgspec.json.encode(calls))
    content = message["content"]
    length = len(content) if isinstance(content, str) else sum(map(_length_of_part, content))
    return length + len(message.get("reasoning_content", "")) + extra + _CHARS_OF_A_MESSAGE


def _length_of_part(part: str | Mapping[str, Any]) -> int:
    if isinstance(part, str):
        return len(part)
    return _CHARS_OF_AN_IMAGE if part["type"] == "image" else len(part.get("text", ""))
