"""Prompts that are longer than the context: Ollama cuts them, the oldest first, unless the request forbids it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from penstock.engines.errors import ContextLengthError
from penstock.gateway.front.context import RequestContext
from penstock.gateway.llm.dataplane import GenerateRequest
from penstock.gateway.ollama.schemas import Options
from penstock.gateway.ollama.translation import whole

Messages = list[dict[str, Any]]
Render = Callable[[Messages, bool], Awaitable[GenerateRequest]]
"""The request with the prompt of these messages; True: it may be longer than the context. Raises PenstockError, and
ContextLengthError for a prompt that is longer and may not be."""

_FEWEST = 4
"""Ollama's smallest context."""
_KEPT = 4
"""Ollama's default of `num_keep`."""
_TRIES = 8
"""Renderings of a conversation that is too long. Three or four find the place."""
_CHARS_OF_A_TOKEN = 3.0
_CHARS_OF_A_MESSAGE = 16
"""That a template writes around each."""


@dataclass(frozen=True, slots=True)
class Window:
    """How long a prompt may be, in tokens."""

    most: int
    """Of one that stays whole."""
    rest: int
    """What stays of a longer one: its answer has room behind it."""
    keep: int
    """Of `rest`, those from the beginning of the prompt; the others are from its end."""
    context_length: int

    def cut(self, prompt: list[int]) -> list[int]:
        if len(prompt) <= self.most:
            return prompt
        return prompt[: self.keep] + prompt[len(prompt) - (self.rest - self.keep) :]

    def shortened(self, prompt: list[int], field: str, context: RequestContext, *, cut: bool) -> list[int]:
        """The prompt, if need be and `cut` the shorter one. Raises ContextLengthError."""
        if len(prompt) <= self.most:
            return prompt
        if not cut:
            raise too_long(self)
        note_cut(field, context)
        return self.cut(prompt)

    def limited(self, wanted: GenerateRequest) -> GenerateRequest:
        """`num_predict` is an upper bound: no more than the context leaves behind the prompt."""
        [prompt] = wanted.prompts
        room = max(self.context_length - len(prompt), 1)
        if wanted.params.max_tokens <= room:
            return wanted
        return replace(wanted, params=msgspec.structs.replace(wanted.params, max_tokens=room))


def window(options: Options, context_length: int, context: RequestContext) -> Window:
    """`num_ctx` bounds the prompt alone. Where a prompt is cut, `num_predict` tokens of the context stay for the
    answer, at most half of it, and a quarter where the request does not say: contexts do not move here while a model
    answers, as they do in Ollama."""
    most, named, predicted = context_length - 1, whole(options.num_ctx), whole(options.num_predict)
    if named is not None and named > context_length:
        context.ignore("options.num_ctx", "the context of this model is shorter on this server.")
    elif named is not None and named > 0:
        most = min(most, max(named, _FEWEST))
    room = context_length // 4 if predicted is None or predicted < 0 else predicted
    rest = max(1, min(most, context_length - max(1, min(room, context_length // 2))))
    kept = whole(options.num_keep)
    keep = _KEPT if kept is None else rest if kept < 0 else kept
    return Window(most, rest, min(keep, rest - 1), context_length)


async def fitted_chat(
    messages: Messages, render: Render, bounds: Window, context: RequestContext, *, cut: bool
) -> GenerateRequest:
    """The request whose prompt fits: the oldest messages are left out, but for those of the system, and of a last one
    that is too long by itself some tokens. Not `cut`: raises ContextLengthError."""
    whole_chat = await _within(bounds.most, messages, render)
    if whole_chat is not None:
        return whole_chat
    if not cut:
        raise too_long(bounds)
    note_cut("messages", context)
    starts = _starts(messages)
    shorter = await _longest_that_fits(messages, starts, render, bounds.rest)
    if shorter is not None:
        return shorter
    wanted = await render(_from(messages, starts[-1] if starts else 0), True)
    return with_prompt(wanted, bounds.cut(only_prompt(wanted)))


def only_prompt(wanted: GenerateRequest) -> list[int]:
    """Of a chat, which is tokens by now."""
    [prompt] = wanted.prompts
    return list(prompt) if isinstance(prompt, list) else []


def with_prompt(wanted: GenerateRequest, prompt: list[int]) -> GenerateRequest:
    return replace(wanted, prompts=[prompt], truncation=None)


def note_cut(field: str, context: RequestContext) -> None:
    context.ignore(field, "what is older is left out, since it is longer than the context.")


def too_long(bounds: Window) -> ContextLengthError:
    message = f"The prompt has more than {bounds.most} tokens, which is what there is room for; truncate true cuts it."
    return ContextLengthError(message, param="truncate")


async def _within(most: int, messages: Messages, render: Render) -> GenerateRequest | None:
    try:
        wanted = await render(messages, False)
    except ContextLengthError:
        return None
    return wanted if len(only_prompt(wanted)) <= most else None


async def _longest_that_fits(
    messages: Messages, starts: Sequence[int], render: Render, most: int
) -> GenerateRequest | None:
    """Of the conversations that begin at one of `starts`, the longest one of at most `most` tokens, or one that is
    almost as long; None: there is none. Each look renders and encodes a conversation, so it is guessed from the
    messages' lengths where to look, and what was seen makes the next guess better."""
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
        wanted = await _within(most, _from(messages, starts[place]), render)
        if wanted is None:
            too_early, chars_of_a_token = place, chars_of_a_token * 0.7
        else:
            best, fits = wanted, place
            chars_of_a_token = -lengths[place] / len(only_prompt(wanted))
    return best


def _starts(messages: Messages) -> list[int]:
    """Where a shorter conversation may begin: at a user's message, or, where not even the last of these fits, at an
    answer behind it. Never at a tool's result, which would be parted from its call."""
    first = next((n for n, each in enumerate(messages) if each["role"] != "system"), len(messages))
    users = [n for n, each in enumerate(messages) if n > first and each["role"] == "user"]
    behind = users[-1] if users else first
    return users + [n for n, each in enumerate(messages) if n > behind and each["role"] not in ("tool", "system")]


def _from(messages: Messages, start: int) -> Messages:
    return [each for each in messages[:start] if each["role"] == "system"] + messages[start:]


def _lengths(messages: Messages, starts: Sequence[int]) -> list[int]:
    """Characters of the conversation from each start on, negative, so that they ascend."""
    total = sum(_length(each) for each in messages if each["role"] == "system")
    lengths: list[int] = []
    end = len(messages)
    for start in reversed(starts):
        total += sum(_length(each) for each in messages[start:end] if each["role"] != "system")
        lengths.append(-total)
        end = start
    return lengths[::-1]


def _length(message: Mapping[str, Any]) -> int:
    calls = message.get("tool_calls")
    extra = 0 if calls is None else len(msgspec.json.encode(calls))
    return len(message["content"]) + len(message.get("reasoning_content", "")) + extra + _CHARS_OF_A_MESSAGE
