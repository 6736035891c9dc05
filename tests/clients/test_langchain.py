"""LangChain and LangGraph by langchain-openai, over Chat Completions and Responses."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from support.agents import MODEL, QUESTION, Calls, Verdict

langchain_openai = pytest.importorskip("langchain_openai")
import openai  # noqa: E402
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, ToolMessage  # noqa: E402
from langchain_core.tools import StructuredTool  # noqa: E402


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def model(request: pytest.FixtureRequest, base_url: str) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=base_url, api_key="none", model=MODEL, max_retries=0, temperature=1, stream_usage=True,
        use_responses_api=request.param,
    )  # fmt: skip


def tools(calls: Calls) -> list[StructuredTool]:
    return [StructuredTool.from_function(tool) for tool in (calls.temperature, calls.season, calls.compare)]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_with_structured_output(model: Any, method: str) -> None:
    structured = model.with_structured_output(Verdict, method=method, strict=True)
    assert isinstance(structured.invoke(QUESTION), Verdict)
    *_, last = structured.stream(QUESTION)
    assert isinstance(last, Verdict)


def test_json_mode(base_url: str) -> None:
    model = langchain_openai.ChatOpenAI(base_url=base_url, api_key="none", model=MODEL, max_retries=0, max_tokens=400)
    structured = model.with_structured_output(None, method="json_mode", include_raw=True)
    with contextlib.suppress(openai.LengthFinishReasonError):  # a small model may not come to its end
        assert isinstance(structured.invoke("Answer in JSON.")["parsed"], dict)


def test_an_agent_loop_by_hand(model: Any) -> None:
    """Parallel calls are streamed, run, and answered by JSON."""
    calls = Calls()
    offered = {tool.name: tool for tool in tools(calls)}
    bound = model.bind_tools(list(offered.values()), tool_choice="any", strict=True, parallel_tool_calls=True)
    whole: AIMessageChunk | None = None
    for chunk in bound.stream(QUESTION, max_tokens=300):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    metadata = str(whole.response_metadata)
    cut_off = "length" in metadata or "max_output_tokens" in metadata
    made = whole.tool_calls[:-1] if cut_off else whole.tool_calls
    messages: list[Any] = [HumanMessage(QUESTION), AIMessage("", tool_calls=made)]
    messages += [ToolMessage(offered[each["name"]].invoke(each["args"]), tool_call_id=each["id"]) for each in made]
    assert len(calls.seen) == len(made) > 0
    assert isinstance(model.with_structured_output(Verdict, method="json_schema").invoke(messages), Verdict)


def test_create_agent(base_url: str) -> None:
    """LangGraph's loop: tools until the model answers, in JSON that the provider guarantees."""
    langchain_agents = pytest.importorskip("langchain.agents")
    structured = pytest.importorskip("langchain.agents.structured_output")
    calls = Calls()
    model = langchain_openai.ChatOpenAI(base_url=base_url, api_key="none", model=MODEL, max_retries=0, seed=1)
    agent = langchain_agents.create_agent(
        model, tools(calls), response_format=structured.ProviderStrategy(Verdict, strict=True)
    )
    state = agent.invoke({"messages": [HumanMessage(QUESTION)]}, {"recursion_limit": 60})
    assert isinstance(state["structured_response"], Verdict)


async def test_streams_and_usage(model: Any) -> None:
    chunks = [chunk async for chunk in model.bind(max_tokens=20).astream("What does os.path.join do?")]
    assert "".join(chunk.text for chunk in chunks)
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 20
