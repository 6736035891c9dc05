"""Prompts as another server's tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

import penstock.gateway
from penstock.engines.errors import OverloadedError
from penstock.gateway.configuration.config import ConfigError
from penstock.gateway.models.upstream.prompt_tokens import PromptEncoder
from penstock.gateway.models.upstream.request_writing import UpstreamRequest
from penstock.tokenizers import Tokenizer

DEMO = Path(penstock.gateway.__file__).parent / "demo_model"
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "say hello"}]}]


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(str(DEMO))


async def tokens(encoder: PromptEncoder, api: Any, **fields: Any) -> list[int]:
    return list(await encoder.tokens(UpstreamRequest(msgspec.json.encode(fields), api), api))


async def test_chats_are_rendered_and_texts_are_encoded_as_the_server_does(encoder: PromptEncoder) -> None:
    tokenizer = Tokenizer(DEMO)
    text = tokenizer.decode(await tokens(encoder, "chat", messages=MESSAGES), skip_special_tokens=False)
    assert "say hello" in text
    assert text.index("say hello") < text.index("assistant"), "the answer's beginning is part of the prompt"
    for prompt in ("say hello", ["say hello", "and more"]):
        assert await tokens(encoder, "completions", prompt=prompt) == tokenizer.encode("say hello")
    for prompt in ([3, 1, 2], [[3, 1, 2], [4]]):
        assert await tokens(encoder, "completions", prompt=prompt) == [3, 1, 2]


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("embeddings", {"input": "say hello"}),
        ("chat", {}),
        ("chat", {"messages": "say hello"}),
        ("chat", {"messages": [{"role": 7, "content": {}}]}),
        ("chat", {"messages": [{"content": [7]}]}),
        ("chat", {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}),
        ("completions", {"prompt": None}),
        ("completions", {"prompt": []}),
        ("completions", {"prompt": [-1]}),
        ("completions", {"prompt": [1 << 80]}),
    ],
)
async def test_what_cannot_be_known_here_is_left_to_the_other_server(
    encoder: PromptEncoder, api: Any, fields: dict[str, Any]
) -> None:
    assert await tokens(encoder, api, **fields) == []


async def test_its_work_is_bounded(encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = await tokens(encoder, "completions", prompt="hello " * (128 << 10))
    assert len(prefix) < 128 << 10
    assert await tokens(encoder, "completions", prompt="x" * (4 << 20)) == []

    async def full(*_: Any) -> None:
        raise OverloadedError("full")

    monkeypatch.setattr(encoder._pool, "run", full)
    assert await tokens(encoder, "completions", prompt="hello") == []


def test_a_folder_without_a_tokenizer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        PromptEncoder(str(tmp_path))
