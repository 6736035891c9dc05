"""Conversations longer than the context: the messages that stay, and how often they are rendered for that."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from penstock.engines.contract.messages import SamplingParams
from penstock.engines.errors import ContextLengthError
from penstock.gateway.apis.ollama.fitting import Messages, fitted_chat, window
from penstock.gateway.apis.ollama.schemas import Options
from penstock.gateway.models.language.dataplane import GenerateRequest
from penstock.gateway.requests.context import RequestContext

CONTEXT = 8192
AROUND = 6
"""Tokens of a template around each message."""


@dataclass
class Model:
    """It has a token for so many characters, at any place in them."""

    chars_of_a_token: float
    rendered: list[Messages] = field(default_factory=list)

    def length(self, messages: Messages) -> int:
        return sum(AROUND + round(len(each["content"]) / self.chars_of_a_token) for each in messages)

    async def render(self, messages: Messages, cut: bool) -> GenerateRequest:
        self.rendered.append(messages)
        length = self.length(messages)
        if length >= CONTEXT and not cut:
            raise ContextLengthError("It is too long.")
        return GenerateRequest(model="m", prompts=[[*range(length)]], params=SamplingParams(max_tokens=1))

    async def fit(self, messages: Messages) -> tuple[Messages, list[int]]:
        """The messages that stay, and the tokens of them that do."""
        bounds = window(Options(num_predict=100), CONTEXT, RequestContext())
        wanted = await fitted_chat(messages, self.render, bounds, RequestContext(), cut=True)
        [prompt] = wanted.prompts
        assert isinstance(prompt, list)
        whole = (each for each in self.rendered if self.length(each) == len(prompt))
        return next(whole, self.rendered[-1]), prompt


def message(role: str, length: int, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": "x" * length, **more}


@pytest.mark.parametrize("chars_of_a_token", [0.3, 1.0, 3.0, 4.5, 12.0])
@pytest.mark.parametrize("length", [1, 50, 400])
async def test_as_many_messages_stay_as_fit(chars_of_a_token: float, length: int) -> None:
    model = Model(chars_of_a_token)
    pairs = [message("user", length), message("assistant", 2 * length)] * 40_000
    kept, prompt = await model.fit([message("system", 20), *pairs[: 200_000 // length], message("user", length)])
    assert [kept[0]["role"], kept[1]["role"]] == ["system", "user"]
    assert len(model.rendered) <= 9
    pair = model.length(pairs[:2])
    assert CONTEXT - 100 - max(pair, CONTEXT // 50) <= len(prompt) <= CONTEXT - 100


@pytest.mark.parametrize("length", range(900, 1000, 7))
async def test_an_agents_steps_begin_with_a_call(length: int) -> None:
    model = Model(1.0)
    steps = [message("assistant", 10, tool_calls=[]), message("tool", length)] * 30
    kept, _ = await model.fit([message("user", 50), *steps])
    assert kept[0]["role"] == "assistant"
    assert len(kept) >= 14


async def test_messages_of_very_different_lengths() -> None:
    model = Model(2.0)
    lengths = [50_000, 10, 10, 9_000, 10, 3_000, 10, 10, 200, 10, 4_000]
    kept, _ = await model.fit([message(("user", "assistant")[n % 2], length) for n, length in enumerate(lengths)])
    assert [len(each["content"]) for each in kept] == lengths[4:], "9,000 characters before these do not fit"


async def test_what_the_system_says_is_not_rendered_again_and_again_where_it_is_all() -> None:
    model = Model(1.0)
    await model.fit([*[message("system", 100)] * 5_000, *[message("user", 5)] * 5_000])
    assert len(model.rendered) == 3


async def test_one_message_is_rendered_twice() -> None:
    model = Model(1.0)
    _, prompt = await model.fit([message("system", 10), message("user", 20_000)])
    assert len(model.rendered) == 2
    assert len(prompt) == CONTEXT - 100
    assert prompt[:5] == [0, 1, 2, 3, prompt[5] - 1]
