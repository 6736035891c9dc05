"""What chat templates are given of a request."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.gateway.apis.anthropic.chat import template_kwargs
from penstock.gateway.apis.anthropic.conversation import continues, template_messages
from penstock.gateway.apis.anthropic.schemas import AnthropicMessage, CountTokensRequest
from penstock.gateway.apis.anthropic.tools import offered_tools
from penstock.gateway.generating.answer_shape import NO_TOOLS, ToolUse
from penstock.gateway.models.language.models import NO_PARSERS, ModelParsers
from penstock.gateway.requests.context import RequestContext
from penstock.tokenizers import Tool, find_reasoning_parser

THINKS = ModelParsers(reasoning=find_reasoning_parser("qwen3"))


def request(*messages: dict[str, Any], **fields: Any) -> CountTokensRequest:
    return msgspec.convert({"model": "m", "messages": list(messages), **fields}, CountTokensRequest)


def translated(*messages: dict[str, Any], system: Any = None, strict: bool = True) -> list[dict[str, Any]]:
    asked = request(*messages, system=system)
    return template_messages(asked.system, asked.messages, RequestContext(strict=strict))


def says(role: str, *blocks: Any) -> dict[str, Any]:
    """A string among the blocks is a text block."""
    shown = [{"type": "text", "text": block} if isinstance(block, str) else block for block in blocks]
    return {"role": role, "content": shown}


def result(call: str, content: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, "content": content}


USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}}
OTHER_USE = USE | {"id": "toolu_2", "input": {}}
CALL = {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bern"}}}
OTHER_CALL = {"id": "toolu_2", "type": "function", "function": {"name": "weather", "arguments": {}}}
HI = {"role": "user", "content": "hi"}
THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": "x"}


def test_a_conversation_with_tools() -> None:
    assert translated(
        HI,
        says("assistant", THOUGHT, "I will ", "look.", USE, OTHER_USE),
        says("user", "Be quick.", result("toolu_1", "Rain."), result("toolu_2", says("", "a", "b")["content"])),
        {"role": "assistant", "content": "Rain."},
        says("user", "Thanks.", "And now?"),
        system="Be kind.",
    ) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": "I will look.",
            "reasoning_content": "Hm.",
            "tool_calls": [CALL, OTHER_CALL],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Rain."},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "a\nb"},
        {"role": "user", "content": "Be quick."},
        {"role": "assistant", "content": "Rain."},
        {"role": "user", "content": "Thanks.\nAnd now?"},
    ]


def test_turns_of_one_side_are_one() -> None:
    assert translated(
        HI,
        says("user", "there"),
        says("assistant", THOUGHT, "a"),
        says("assistant", "b", USE),
        says("assistant", THOUGHT),
        says("user", result("toolu_1", "Rain.")),
    ) == [
        {"role": "user", "content": "hi\nthere"},
        {"role": "assistant", "content": "ab", "reasoning_content": "Hm.Hm.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Rain."},
    ]


@pytest.mark.timeout(20)  # joined one by one, they would take minutes, in which the server does nothing else
@pytest.mark.parametrize(("role", "between"), [("user", "\n"), ("assistant", "")])
def test_a_turn_may_have_as_many_messages_as_a_body_can_hold(role: str, between: str) -> None:
    count, text = 100_000, "x" * 40
    assert template_messages(None, [AnthropicMessage(role, text)] * count, RequestContext(strict=True)) == [
        {"role": role, "content": between.join([text] * count)}
    ]


@pytest.mark.parametrize(
    ("system", "text"),
    [
        (None, None),
        ("", None),
        ([], None),
        ("Be kind.", "Be kind."),
        (
            [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}],
            "a\nb",
        ),
        ([{"type": "text", "text": "x-anthropic-billing-header: cc_version=1"}, {"type": "text", "text": "b"}], "b"),
    ],
)
def test_the_system_prompt(system: Any, text: str | None) -> None:
    head = [] if text is None else [{"role": "system", "content": text}]
    assert translated(HI, system=system) == [*head, HI]


def test_system_messages_stay_where_they_are() -> None:
    later = {"role": "system", "content": "Be brief."}
    assert translated(HI, later, HI, system="a") == [{"role": "system", "content": "a"}, HI, later, HI]


@pytest.mark.parametrize("content", [None, "", []])
def test_a_tool_may_answer_nothing(content: Any) -> None:
    [*_, answer] = translated(HI, says("assistant", USE), says("user", result("toolu_1", content)))
    assert answer == {"role": "tool", "tool_call_id": "toolu_1", "content": ""}


def test_thoughts_that_nobody_can_read_are_left_out() -> None:
    redacted = {"type": "redacted_thinking", "data": "c2VjcmV0"}
    assert translated(HI, says("assistant", redacted, "a"), strict=False)[-1] == {"role": "assistant", "content": "a"}


def test_an_answer_that_was_empty_may_come_back() -> None:
    assert translated(HI, says("assistant"), HI)[1] == {"role": "assistant", "content": ""}


def test_the_last_message_is_continued_where_it_is_the_assistant_s() -> None:
    assert not continues(translated(HI))
    assert continues(translated(HI, says("assistant", "The answer is (")))
    assert not continues(translated(HI, says("assistant", USE), says("user", result("toolu_1", "5"))))


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({}, {}),
        ({"thinking": {"type": "enabled"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "adaptive", "display": "summarized"}}, {"enable_thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"output_config": {"effort": "high"}}, {"reasoning_effort": "high"}),
        ({"output_config": {"format": None}}, {}),
    ],
)
def test_thinking_is_for_the_template(fields: dict[str, Any], kwargs: dict[str, Any]) -> None:
    asked = request(HI, **fields)
    assert template_kwargs(asked.thinking, asked.output_config, THINKS, RequestContext(strict=True)) == kwargs


def test_a_model_that_does_not_think_may_answer_with_any_effort() -> None:
    asked = request(HI, output_config={"effort": "high"}, thinking={"type": "adaptive"})
    assert template_kwargs(asked.thinking, asked.output_config, NO_PARSERS, RequestContext()) == {
        "enable_thinking": True
    }


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.mark.parametrize("choice", [None, {"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": False}])
def test_tools_are_shown_to_the_template_as_functions(choice: Any) -> None:
    given = [
        {"name": "weather", "description": "Tells it.", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
        {"name": "time", "input_schema": {}, "type": "custom"},
    ]
    asked = request(HI, tools=given, tool_choice=choice)
    offered = offered_tools(asked.tools, asked.tool_choice, RequestContext())
    assert list(offered.use.tools) == [Tool("weather", SCHEMA), Tool("time", {})]
    assert offered.shown == [
        {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": SCHEMA}},
        {"type": "function", "function": {"name": "time", "parameters": {}}},
    ]
    assert offered.use == ToolUse(offered.use.tools)


def test_no_tools_and_one_call() -> None:
    given = [{"name": "time", "input_schema": {}}]
    none = request(HI, tools=given, tool_choice={"type": "none"})
    asked = [(none.tools, none.tool_choice), ([], None), (None, None)]
    for offered in [offered_tools(*each, RequestContext()) for each in asked]:
        assert (offered.use, offered.shown) == (NO_TOOLS, None)
    one = request(HI, tools=given, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert not offered_tools(one.tools, one.tool_choice, RequestContext()).use.in_parallel


@pytest.mark.parametrize(
    ("choice", "names", "named", "parallel"),
    [
        ({"type": "any"}, ["weather", "time"], False, True),
        ({"type": "any", "disable_parallel_tool_use": True}, ["weather", "time"], False, False),
        ({"type": "tool", "name": "time"}, ["time"], True, False),
    ],
)
def test_forced_calls(choice: Any, names: list[str], named: bool, parallel: bool) -> None:
    given = [{"name": name, "input_schema": SCHEMA, "strict": True} for name in ("weather", "time")]
    asked = request(HI, tools=given, tool_choice=choice)
    offered = offered_tools(asked.tools, asked.tool_choice, RequestContext())
    assert offered.use == ToolUse([Tool(name, SCHEMA, True) for name in names], True, named, parallel)
    assert offered.shown is not None
    assert [tool["function"]["name"] for tool in offered.shown] == ["weather", "time"]
