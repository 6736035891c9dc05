"""Which call each result of a tool belongs to, where neither has an id."""

from __future__ import annotations

import pytest

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.ollama.schemas import CalledFunction, Message, ToolCall
from penstock.gateway.ollama.translation import template_messages


def calls(*names: str) -> Message:
    return Message("assistant", tool_calls=[ToolCall(CalledFunction(name)) for name in names])


def results(*names: str | None) -> list[Message]:
    return [Message("tool", "done", tool_name=name) for name in names]


def answered(*messages: Message) -> list[tuple[str, str]]:
    return [(each["name"], each["tool_call_id"]) for each in template_messages(messages) if each["role"] == "tool"]


def test_a_result_belongs_to_the_first_call_of_its_name() -> None:
    found = answered(calls("a", "b", "a"), *results("b", "a"), calls("b"), *results(None, "b"))
    assert found == [("b", "call_0_1"), ("a", "call_0_0"), ("a", "call_0_2"), ("b", "call_3_0")]


@pytest.mark.parametrize("names", [("c",), ("a", "a"), (None, "a"), (None, None)])
def test_there_is_a_call_for_each_result(names: tuple[str | None, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="answers no tool call"):
        template_messages([calls("a"), *results(*names)])


@pytest.mark.timeout(20)  # with a look at all open calls for each, they would take minutes
@pytest.mark.parametrize("name", ["a", None])
def test_there_may_be_as_many_results_as_a_body_can_hold(name: str | None) -> None:
    count = 50_000
    found = answered(calls(*["a"] * count), *results(name) * count)
    assert found == [("a", f"call_0_{number}") for number in range(count)]
