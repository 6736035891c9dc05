"""Pydantic AI over Chat Completions and Responses.

Its model for Anthropic fails inside the current anthropic package."""

from __future__ import annotations

from typing import Any

import pytest

from support.agents import MODEL, QUESTION, Calls, Verdict

pydantic_ai = pytest.importorskip("pydantic_ai")


def openai_model(name: str, base_url: str) -> Any:
    openai_models = pytest.importorskip("pydantic_ai.models.openai")
    provider = pytest.importorskip("pydantic_ai.providers.openai").OpenAIProvider(base_url=base_url, api_key="none")
    return getattr(openai_models, name)(MODEL, provider=provider)


@pytest.mark.parametrize("name", ["OpenAIChatModel", "OpenAIResponsesModel"])
async def test_output_by_tool(base_url: str, name: str) -> None:
    agent = pydantic_ai.Agent(openai_model(name, base_url), output_type=Verdict)
    result = await agent.run(QUESTION, model_settings={"max_tokens": 200})
    assert isinstance(result.output, Verdict)


async def test_native_output_behind_tools(base_url: str) -> None:
    calls = Calls()
    agent = pydantic_ai.Agent(
        openai_model("OpenAIChatModel", base_url),
        output_type=pydantic_ai.NativeOutput(Verdict, strict=True),
        tools=[pydantic_ai.Tool(tool, strict=True) for tool in (calls.temperature, calls.season, calls.compare)],
    )
    async with agent.run_stream(QUESTION, model_settings={"max_tokens": 200, "seed": 1}) as result:
        assert isinstance(await result.get_output(), Verdict)
