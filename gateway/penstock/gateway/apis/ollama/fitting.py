"""Prompts that are longer than the context: Ollama cuts them, the oldest first, unless the request forbids it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from penstock.engines.errors import ContextLengthError
from penstock.gateway.apis.ollama.schemas import Options
from penstock.gateway.apis.ollama.translation import whole
from penstock.gateway.generating.fitting import longest_that_fits, only_prompt, within
from penstock.gateway.models.language.dataplane import GenerateRequest
from penstock.gateway.requests.context import RequestContext

Messages = list[dict[str, Any]]
Render = Callable[[Messages, bool], Awaitable[GenerateRequest]]
"""The request with the prompt of these messages; True: it may be longer than the context. Raises PenstockError, and
ContextLengthError for a prompt that is longer and may not be."""

_FEWEST = 4
"""Ollama's smallest context."""
_KEPT = 4
"""Ollama's default of `num_keep`."""


@dataclass(frozen=True, slots=True)
class PromptWindow:
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

    def limited(self, text_request: GenerateRequest) -> GenerateRequest:
        """`num_predict` is an upper bound: no more than the context leaves behind the prompt."""
        [prompt] = text_request.prompts
        room = max(self.context_length - len(prompt), 1)
        if text_request.params.max_tokens <= room:
            return text_request
        return replace(text_request, params=msgspec.structs.replace(text_request.params, max_tokens=room))


def window(options: Options, context_length: int, context: RequestContext) -> PromptWindow:
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
    return PromptWindow(most, rest, min(keep, rest - 1), context_length)


async def fitted_chat(
    messages: Messages, render: Render, bounds: PromptWindow, context: RequestContext, *, cut: bool
) -> GenerateRequest:
    """The request whose prompt fits: the oldest messages are left out, but for those of the system, and of a last one
    that is too long by itself some tokens. Not `cut`: raises ContextLengthError."""
    whole_chat = await within(bounds.most, render(messages, False))
    if whole_chat is not None:
        return whole_chat
    if not cut:
        raise too_long(bounds)
    note_cut("messages", context)
    starts = _starts(messages)
    shorter = await longest_that_fits(
        messages, starts, lambda start: render(_from(messages, start), False), bounds.rest
    )
    if shorter is not None:
        return shorter
    text_request = await render(_from(messages, starts[-1] if starts else 0), True)
    return with_prompt(text_request, bounds.cut(only_prompt(text_request)))


def with_prompt(text_request: GenerateRequest, prompt: list[int]) -> GenerateRequest:
    """Raises ContextLengthError where images would lose their places."""
    if text_request.images and prompt != only_prompt(text_request):
        message = "The images of this prompt do not fit into the context with its text."
        raise ContextLengthError(message, param="images")
    return replace(text_request, prompts=[prompt], truncation=None)


def note_cut(field: str, context: RequestContext) -> None:
    context.ignore(field, "what is older is left out, since it is longer than the context.")


def too_long(bounds: PromptWindow) -> ContextLengthError:
    message = f"The prompt has more than {bounds.most} tokens, which is what there is room for; truncate true cuts it."
    return ContextLengthError(message, param="truncate")


def _starts(messages: Messages) -> list[int]:
    """Where a shorter conversation may begin: at a user's message, or, where not even the last of these fits, at an
    answer behind it. Never at a tool's result, which would be parted from its call."""
    first = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    users = [n for n, message in enumerate(messages) if n > first and message["role"] == "user"]
    behind = users[-1] if users else first
    return users + [n for n, message in enumerate(messages) if n > behind and message["role"] not in ("tool", "system")]


def _from(messages: Messages, start: int) -> Messages:
    return [message for message in messages[:start] if message["role"] == "system"] + messages[start:]
