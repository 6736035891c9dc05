"""Which call each result of a tool belongs to, where neither has an id."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.front.context import RequestContext
from penstock.gateway.ollama.schemas import CalledFunction, Message, ToolCall
from penstock.gateway.ollama.translation import role_reader, template_messages


def calls(*names: str) -> Message:
    return Message("assistant", tool_calls=[ToolCall(CalledFunction(name)) for name in names])


def results(*names: str | None) -> list[Message]:
    return [Message("tool", "done", tool_name=name) for name in names]


def answered(*messages: Message) -> list[tuple[str, str]]:
    found, _ = shown(*messages)
    return [(each["name"], each["tool_call_id"]) for each in found if each["role"] == "tool"]


def shown(*messages: Message, source: str = "") -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """What a template gets, and what was noted."""
    context = RequestContext()
    return template_messages(messages, context, role_reader(source)), context.record.ignored


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
    called = Message("assistant", tool_calls=[ToolCall(CalledFunction("a"), id=each) for each in ("x", "y")])
    answers = [Message("tool", tool_name="a", tool_call_id="y"), Message("tool", tool_name="a")]
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
    found, ignored = shown(Message("assistant", tool_calls=[ToolCall(CalledFunction("f", arguments))]))
    assert found[0]["tool_calls"][0]["function"]["arguments"] == as_shown
    assert ignored == noted


GRANITE = "{% if message['role'] == 'system' or message.role in ['control', \"pause\"] %}"


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
    found, noted = shown(Message("user", "a"), Message(role, "b"), source=GRANITE)
    assert found[1]["role"] == as_shown
    assert ("messages[].role" in noted) is (as_shown == "user")


def test_an_image_leaves_a_line_of_text() -> None:
    found, noted = shown(Message("user", "look", images=["aGk="]), Message("user", images=["aGk="]))
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
