"""LlamaIndex by its client for servers that speak OpenAI's API; it needs an openai client before 3."""

from __future__ import annotations

from typing import Any

import pytest

from support.agents import MODEL, QUESTION, Calls, Verdict

openai_like = pytest.importorskip("llama_index.llms.openai_like")
from llama_index.core.llms import ChatMessage  # noqa: E402
from llama_index.core.tools import FunctionTool  # noqa: E402


@pytest.fixture
def model(base_url: str) -> Any:
    return openai_like.OpenAILike(
        model=MODEL, api_base=base_url, api_key="none", is_chat_model=True, is_function_calling_model=True,
        should_use_structured_outputs=True, max_retries=0, max_tokens=200,
    )  # fmt: skip


def test_chat_and_stream(model: Any) -> None:
    asked = [ChatMessage(role="user", content=QUESTION)]
    assert model.chat(asked).message.content
    assert "".join(chunk.delta or "" for chunk in model.stream_chat(asked))
    assert model.complete(QUESTION).text


def test_structured_output(model: Any) -> None:
    structured = model.as_structured_llm(Verdict)
    answer = structured.chat([ChatMessage(role="user", content=QUESTION)])
    assert isinstance(answer.raw, Verdict)


def test_forced_calls(model: Any) -> None:
    calls = Calls()
    tools = [FunctionTool.from_defaults(fn=tool) for tool in (calls.temperature, calls.season, calls.compare)]
    answer = model.chat_with_tools(tools, QUESTION, tool_required=True, allow_parallel_tool_calls=False)
    [call] = model.get_tool_calls_from_response(answer)
    assert call.tool_name in ("temperature", "season", "compare")
    result = model.predict_and_call(tools, QUESTION, tool_required=True, allow_parallel_tool_calls=False)
    assert str(result) in ("4", "18", "autumn")
