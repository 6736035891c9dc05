"""OpenAI's Agents SDK, over both of its APIs: an agent that must call tools first, then answers in JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.agents import MODEL, QUESTION, Calls, Verdict
from support.server import serving

agents = pytest.importorskip("agents")


@pytest.fixture(params=["chat", "responses"])
def model(request: pytest.FixtureRequest, base_url: str) -> Iterator[Any]:
    agents.set_tracing_disabled(True)
    client = agents.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
    kinds = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}
    return kinds[request.param](model=MODEL, openai_client=client)


def agent(model: Any, calls: Calls, **options: Any) -> Any:
    """Offers its tools until one was called; a model that knows nothing of tools might call them for ever."""
    named = (calls.temperature, calls.season, calls.compare)
    tools = [agents.function_tool(tool, is_enabled=lambda *_: not calls.seen) for tool in named]
    settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    return agents.Agent(name="weather", model=model, tools=tools, model_settings=settings, **options)


async def test_tools_then_an_answer_in_json(model: Any) -> None:
    calls = Calls()
    result = agents.Runner.run_streamed(agent(model, calls, output_type=Verdict), QUESTION)
    kinds = [event.type async for event in result.stream_events()]
    assert calls.seen
    assert isinstance(result.final_output, Verdict)
    assert {"raw_response_event", "run_item_stream_event"} <= set(kinds)


async def test_the_first_tool_ends_the_run(model: Any) -> None:
    calls = Calls()
    result = await agents.Runner.run(agent(model, calls, tool_use_behavior="stop_on_first_tool"), QUESTION)
    assert result.final_output in ("4", "18", "autumn")
    assert result.context_wrapper.usage.output_tokens > 0


async def test_a_handoff(model: Any) -> None:
    calls = Calls()
    expert = agent(model, calls, tool_use_behavior="stop_on_first_tool")
    settings = agents.ModelSettings(tool_choice="required", parallel_tool_calls=False)
    first = agents.Agent(name="desk", model=model, handoffs=[expert], model_settings=settings)
    result = await agents.Runner.run(first, QUESTION)
    assert result.last_agent is expert
    assert len(calls.seen) == 1


THINKING = (
    "{% if reasoning_effort %}Effort: {{ reasoning_effort }}\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "assistant: <think>\n"
)


@pytest.fixture(scope="module")
def thinking_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its model begins each answer inside of a thought."""
    template = tmp_path_factory.mktemp("template") / "thinking.jinja"
    template.write_text(THINKING)
    flags = ("--reasoning-parser", "deepseek_r1", "--tool-parser", "hermes", "--chat-template", str(template))
    with serving(*flags) as running:
        yield f"{running.url}/v1"


def encoded(item: dict[str, Any]) -> dict[str, Any]:
    """As clients send it that keep nothing of a thought but its `encrypted_content`."""
    return {name: item[name] for name in item if item.get("type") != "reasoning" or name != "content"}


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_goes_from_turn_to_turn_without_a_store(thinking_url: str, stream: bool) -> None:
    from openai.types.shared import Reasoning

    agents.set_tracing_disabled(True)
    client = agents.AsyncOpenAI(base_url=thinking_url, api_key="none", max_retries=0)
    calls = Calls()
    made = agent(agents.OpenAIResponsesModel(model=MODEL, openai_client=client), calls)
    made.model_settings = made.model_settings.resolve(
        agents.ModelSettings(
            reasoning=Reasoning(effort="low", summary="auto"),
            response_include=["reasoning.encrypted_content"],
            store=False,
            extra_body={"thinking_token_budget": 8},
        )
    )
    conversation: Any = [{"role": "user", "content": QUESTION}]
    for _ in range(2):
        calls.seen.clear()
        if stream:
            result = agents.Runner.run_streamed(made, conversation)
            assert [event async for event in result.stream_events()]
        else:
            result = await agents.Runner.run(made, conversation)
        assert calls.seen
        conversation = [*map(encoded, result.to_input_list()), {"role": "user", "content": "And in winter?"}]
    thoughts = [item for item in conversation if item.get("type") == "reasoning"]
    assert len(thoughts) == 4, "each turn is a call and an answer"
    assert all(thought["encrypted_content"] for thought in thoughts)
