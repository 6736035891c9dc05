"""The answers of an LLM, made from its generations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.gateway.apis.openai.objects import finish_reason, has_call, message
from penstock.gateway.generating.streams import Collected
from penstock.gateway.models.language.dataplane import Generation, TokenLogprob, Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the `n` answers to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    """stop, length, or in a chat tool_calls."""
    stop_reason: str | int | None
    """The stop string or stop token id that ended it."""
    logprobs: list[TokenLogprob] | None = None
    """One for each token, if they were asked for."""
    message: dict[str, Any] = field(default_factory=dict)
    """Of a chat: the answer as OpenAI's API has it, with `tool_calls` and `reasoning_content` where there are any; to
    be appended to the messages for the next turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """All answers to one prompt or conversation."""

    prompt: str | list[int] | None
    """As it was given; None for a chat."""
    prompt_token_ids: list[int]
    outputs: list[Choice]
    usage: Usage
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def text(self) -> str:
        """Of the first answer."""
        return self.outputs[0].text


def completion_answer(
    prompt: str | list[int], generation: Generation, collected: list[Collected], *, logprobs: bool
) -> Answer:
    choices = [_choice(index, answer, logprobs) for index, answer in enumerate(collected)]
    return _answer(prompt, generation, choices)


def chat_answer(generation: Generation, collected: list[Collected], *, logprobs: bool, names_tool: bool) -> Answer:
    """`names_tool`: the request names the one tool that is called, so that the call ends nothing."""
    choices = []
    for index, answer in enumerate(collected):
        called = has_call(answer.parts) and not names_tool
        answer.finish_reason = finish_reason(answer.finish_reason, called=called)
        shown = {
            name: value
            for name, value in msgspec.to_builtins(message(answer.text, answer.parts)).items()
            if name not in ("refusal", "reasoning")
        }
        choices.append(_choice(index, answer, logprobs, shown))
    return _answer(None, generation, choices)


def _choice(index: int, collected: Collected, logprobs: bool, shown: dict[str, Any] | None = None) -> Choice:
    return Choice(
        index=index,
        text=collected.text,
        token_ids=collected.token_ids,
        finish_reason=collected.finish_reason,
        stop_reason=collected.stop_reason,
        logprobs=collected.logprobs if logprobs else None,
        message=shown or {},
    )


def _answer(prompt: str | list[int] | None, generation: Generation, choices: list[Choice]) -> Answer:
    known = generation.prompt_logprobs
    return Answer(
        prompt=prompt,
        prompt_token_ids=generation.prompt_token_ids[0],
        outputs=choices,
        usage=generation.usage,
        prompt_logprobs=None if known is None else known[0],
    )
