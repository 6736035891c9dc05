"""LiteLLM's provider for servers that speak OpenAI's API, and for Anthropic's."""

from __future__ import annotations

import re
from typing import Any

import pytest

from support.agents import MODEL, QUESTION, Verdict

litellm = pytest.importorskip("litellm")

TOOL = {
    "type": "function",
    "function": {
        "name": "temperature",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": QUESTION}],
    "api_key": "none",
    "max_tokens": 800,
    "temperature": 0,  # the same answers each time
}


@pytest.fixture(params=["openai", "hosted_vllm", "anthropic"])
def asked(request: pytest.FixtureRequest, base_url: str) -> dict[str, Any]:
    api_base = base_url.removesuffix("/v1") if request.param == "anthropic" else base_url
    return ASKED | {"model": f"{request.param}/{MODEL}", "api_base": api_base}


def test_answers_and_streams(asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0
    chunks = list(litellm.completion(**asked, stream=True))
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content


def test_a_forced_call(asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked, tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    [call] = answer.choices[0].message.tool_calls
    # LiteLLM drops `additionalProperties` on the way to vLLM: there the model may add properties until `max_tokens`
    assert re.match(r'\s*\{\s*"city"\s*:\s*"(Oslo|Rome)"\s*[,}]', call.function.arguments), call.function.arguments


def test_an_answer_in_json(asked: dict[str, Any]) -> None:
    answer = litellm.completion(**asked, response_format=Verdict)
    assert Verdict.model_validate_json(answer.choices[0].message.content)


def test_responses_bring_a_text(base_url: str) -> None:
    answer = litellm.responses(model=f"openai/{MODEL}", input=QUESTION, api_base=base_url, api_key="none")
    assert answer.output[0].content[0].text
