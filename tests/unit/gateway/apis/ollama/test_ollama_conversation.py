"""Messages, tools and thinking of Ollama's chats, as templates get them: results of tools have no ids there."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.apis.ollama.schemas import (
    CalledFunction,
    OllamaChatRequest,
    OllamaMessage,
    OllamaToolCall,
    Options,
)
from penstock.gateway.apis.ollama.translation import openai_chat, sampling_fields, template_messages
from penstock.gateway.models.language.dataplane import ServedModel
from penstock.gateway.models.language.models import ModelParsers
from penstock.gateway.requests.context import RequestContext
from penstock.tokenizers import find_reasoning_parser
from protocol.fake_dataplane import INFO


def calls(*names: str) -> OllamaMessage:
    return OllamaMessage("assistant", tool_calls=[OllamaToolCall(CalledFunction(name)) for name in names])


def results(*names: str | None) -> list[OllamaMessage]:
    return [OllamaMessage("tool", "done", tool_name=name) for name in names]


def answered(*messages: OllamaMessage) -> list[tuple[str, str]]:
    found, _ = shown(*messages)
    return [(each["name"], each["tool_call_id"]) for each in found if each["role"] == "tool"]


def shown(
    *messages: OllamaMessage, roles: frozenset[str] = frozenset()
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """What a template gets, and what was noted."""
    context = RequestContext()
    return template_messages(messages, context, roles), context.record.ignored


def test_a_result_belongs_to_the_first_call_of_its_name() -> None:
    found = answered(calls("a", "b", "a"), *results("b", "a"), calls("b"), *results(None, "b"))
    assert found == [("b", "call_0_1"), ("a", "call_0_0"), ("a", "call_0_2"), ("b", "call_3_0")]


@pytest.mark.parametrize("names", [("c",), ("a", "a"), (None, "a"), (None, None)])
def test_a_result_without_a_call_stays_a_result(names: tuple[str | None, ...]) -> None:
    found, noted = shown(calls("a"), *results(*names))
    assert found[-1] == {
        "role": "tool",
        "content": "done",
        "name": names[-1] or "tool",
        "tool_call_id": f"call_{len(names)}_0",
    }
    assert noted == ("messages[].tool_name",)


def test_ids_come_before_names() -> None:
    called = OllamaMessage(
        "assistant", tool_calls=[OllamaToolCall(CalledFunction("a"), id=each) for each in ("x", "y")]
    )
    answers = [OllamaMessage("tool", tool_name="a", tool_call_id="y"), OllamaMessage("tool", tool_name="a")]
    assert answered(called, *answers) == [("a", "y"), ("a", "x")]


@pytest.mark.parametrize(
    ("arguments", "as_shown", "noted"),
    [
        ({"a": 1}, {"a": 1}, ()),
        ('{"a": 1}', '{"a": 1}', ()),
        (None, "{}", ()),
        ('{"a": ', '{"malformed_arguments":"{\\"a\\": "}', ("messages[].tool_calls[].function.arguments",)),
    ],
)
def test_arguments_of_earlier_calls(arguments: Any, as_shown: Any, noted: tuple[str, ...]) -> None:
    found, ignored = shown(OllamaMessage("assistant", tool_calls=[OllamaToolCall(CalledFunction("f", arguments))]))
    assert found[0]["tool_calls"][0]["function"]["arguments"] == as_shown
    assert ignored == noted


GRANITE = frozenset({"control", "pause"})


@pytest.mark.parametrize(
    ("role", "as_shown"),
    [
        ("developer", "system"),
        ("function", "tool"),
        ("control", "control"),
        ("pause", "pause"),
        ("ghost", "user"),
        ("", "user"),
        ("message", "user"),
        ("control<|end|>", "user"),
        (".*", "user"),
    ],
)
def test_a_role_that_the_template_does_not_know_is_the_users(role: str, as_shown: str) -> None:
    found, noted = shown(OllamaMessage("user", "a"), OllamaMessage(role, "b"), roles=GRANITE)
    assert found[1]["role"] == as_shown
    assert ("messages[].role" in noted) is (as_shown == "user")


@pytest.mark.parametrize(
    ("think", "variables", "kwargs", "noted"),
    [
        (True, {"enable_thinking"}, {"enable_thinking": True}, ()),
        (False, {"enable_thinking"}, {"enable_thinking": False}, ()),
        ("none", {"enable_thinking"}, {"enable_thinking": False}, ()),
        ("high", {"enable_thinking"}, {"enable_thinking": True}, ("think",)),
        ("max", {"reasoning_effort"}, {"reasoning_effort": "max"}, ()),
        (True, set(), {}, ()),
        (None, {"enable_thinking"}, None, ()),
    ],
)
def test_what_a_template_is_told_of_thinking(think: Any, variables: set[str], kwargs: Any, noted: Any) -> None:
    context, sampling = RequestContext(), sampling_fields(Options(), RequestContext())
    parsers = ModelParsers(reasoning=find_reasoning_parser("qwen3"))
    model = ServedModel("m", "root", 0, INFO, template_variables=frozenset(variables), parsers=parsers)
    chat = openai_chat(OllamaChatRequest(model="m", think=think), "m", None, sampling, context, model)
    assert (chat.chat_template_kwargs, context.record.ignored) == (kwargs, noted)
    assert chat.include_reasoning is (think not in (False, "none"))


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("tool", "as_shown"),
    [
        (TOOL, TOOL),
        ({"function": {"name": "f"}}, TOOL),
        (
            {"type": "", "function": {"name": "f", "parameters": {"properties": {}}}},
            {"type": "function", "function": {"name": "f", "parameters": {"properties": {}, "type": "object"}}},
        ),
        ({"type": "web_search"}, None),
        ({"type": "function", "function": None}, None),
        ({"type": "function", "function": {"description": "of no name"}}, None),
    ],
)
def test_tools_that_a_model_can_call(tool: dict[str, Any], as_shown: dict[str, Any] | None) -> None:
    context, sampling = RequestContext(), sampling_fields(Options(), RequestContext())
    chat = openai_chat(OllamaChatRequest(model="m"), "m", [tool], sampling, context)
    assert chat.tools == (None if as_shown is None else [as_shown])
    assert chat.tool_choice == (None if as_shown is None else "auto")
    assert context.record.ignored == (("tools[]",) if as_shown is None else ())


def test_an_image_leaves_a_line_of_text() -> None:
    found, noted = shown(OllamaMessage("user", "look", images=["aGk="]), OllamaMessage("user", images=["aGk="]))
    line = found[1]["content"]
    assert found[0]["content"] == f"look\n{line}"
    assert "image" in line
    assert noted == ("messages[].images",)


@pytest.mark.timeout(20)  # with a look at all open calls for each, they would take minutes
@pytest.mark.parametrize("name", ["a", None])
def test_there_may_be_as_many_results_as_a_body_can_hold(name: str | None) -> None:
    count = 50_000
    found = answered(calls(*["a"] * count), *results(name) * count)
    assert found == [("a", f"call_0_{number}") for number in range(count)]
