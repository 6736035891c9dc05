"""From items to what a chat template and the chat front are given."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.apis.responses.chat_request import chat_request
from penstock.gateway.apis.responses.conversation import template_messages
from penstock.gateway.apis.responses.items import decode_reasoning, encode_reasoning, input_items, shown_item
from penstock.gateway.apis.responses.schemas import LOGPROBS, GivenItem, Include, InputItem, ResponsesRequest
from penstock.gateway.apis.responses.tools import NO_TOOLS, response_tools
from penstock.gateway.requests.context import RequestContext
from support.responses import validated_item

CONVERSATION: list[dict[str, Any]] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
    {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}, {"type": "input_text", "text": "Snow?"}]},
    {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]},
    {"type": "message", "id": "m", "role": "assistant", "status": "completed",
     "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
    {"type": "function_call", "call_id": "a", "name": "rain", "arguments": '{"city": "Bern"}', "id": "fc"},
    {"type": "function_call", "call_id": "b", "name": "snow", "arguments": ""},
    {"type": "function_call_output", "call_id": "b", "output": "no"},
    {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "yes"}]},
    {"role": "assistant", "content": "It rains."},
    {"role": "user", "content": "Thanks"},
]  # fmt: skip
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Speak.\nBe kind."},
    {"role": "user", "content": "Rain?\nSnow?"},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Look.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "rain", "arguments": '{"city": "Bern"}'}},
            {"id": "b", "type": "function", "function": {"name": "snow", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "b", "content": "no"},
    {"role": "tool", "tool_call_id": "a", "content": "yes"},
    {"role": "assistant", "content": "It rains."},
    {"role": "user", "content": "Thanks"},
]


def items_of(given: list[dict[str, Any]]) -> list[InputItem]:
    return input_items(msgspec.convert(given, list[GivenItem]), RequestContext())


def test_a_conversation_with_tools() -> None:
    assert template_messages("Speak.", [], items_of(CONVERSATION), NO_TOOLS, RequestContext()) == MESSAGES


@pytest.mark.parametrize("cut", range(len(CONVERSATION)))
def test_wherever_a_response_lies_between_the_messages_are_the_same(cut: int) -> None:
    """What was kept of the earlier ones is their items as they are shown."""
    kept = msgspec.convert([shown_item(item) for item in items_of(CONVERSATION)[:cut]], list[InputItem])
    assert template_messages("Speak.", kept, items_of(CONVERSATION)[cut:], NO_TOOLS, RequestContext()) == MESSAGES


@pytest.mark.timeout(10)  # joined one by one, they would take minutes, in which the server does nothing else
@pytest.mark.parametrize(("role", "between"), [("system", "\n"), ("assistant", "")])
def test_a_turn_may_have_as_many_items_as_a_body_can_hold(role: str, between: str) -> None:
    count, text = 100_000, "x" * 40
    assert template_messages(None, [], [InputItem(role=role, content=text)] * count, NO_TOOLS, RequestContext()) == [
        {"role": role, "content": between.join([text] * count)}
    ]


def test_a_text_is_the_user_s() -> None:
    assert template_messages(None, [], input_items("hi", RequestContext()), NO_TOOLS, RequestContext()) == [
        {"role": "user", "content": "hi"}
    ]


@pytest.mark.parametrize("fields", [{}, {"content": []}, {"content": None, "encrypted_content": ""}])
def test_thoughts_without_a_text_are_left_out(fields: dict[str, Any]) -> None:
    thought = {"type": "reasoning", "id": "rs", "summary": []} | fields
    assert template_messages(
        None, [], items_of([{"role": "user", "content": "a"}, thought, CONVERSATION[3]]), NO_TOOLS, RequestContext()
    ) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "I look."},
    ]


@pytest.mark.parametrize("empty", [{}, {"content": []}, {"content": None}])
def test_a_thought_that_is_only_encoded_is_read(empty: dict[str, Any]) -> None:
    encoded = {"type": "reasoning", "summary": [], "encrypted_content": encode_reasoning("Look.")} | empty
    items = items_of([*CONVERSATION[:2], encoded, *CONVERSATION[3:]])
    assert template_messages("Speak.", [], items, NO_TOOLS, RequestContext()) == MESSAGES
    kept = msgspec.convert([shown_item(item) for item in items], list[InputItem])
    assert template_messages("Speak.", kept, [], NO_TOOLS, RequestContext()) == MESSAGES


def test_a_thought_s_content_comes_before_what_is_encoded() -> None:
    for other in (encode_reasoning("Sleep."), "of another server"):
        thought = CONVERSATION[2] | {"encrypted_content": other}
        assert (
            template_messages(
                "Speak.", [], items_of([*CONVERSATION[:2], thought, *CONVERSATION[3:]]), NO_TOOLS, RequestContext()
            )
            == MESSAGES
        )


@given(text=st.text())
def test_any_thought_can_be_encoded(text: str) -> None:
    encoded = encode_reasoning(text)
    assert encoded.isascii()
    assert decode_reasoning(encoded) == text


@pytest.mark.parametrize("number", range(len(CONVERSATION)))
def test_items_are_shown_as_openai_s_types_want_them(number: int) -> None:
    [item] = items_of([CONVERSATION[number]])
    shown = validated_item(shown_item(item))
    assert shown["type"] == CONVERSATION[number].get("type", "message")
    assert shown["id"] == CONVERSATION[number].get("id", shown["id"])


def asked(**fields: Any) -> Any:
    request, context = msgspec.convert({"model": "m", "input": "hi", **fields}, ResponsesRequest), RequestContext()
    include = Include.parse(request.include, context)
    return chat_request(request, response_tools(request, context), include, context)


def test_functions_become_tools_of_a_chat() -> None:
    function = {"name": "rain", "description": "d", "parameters": {"type": "object"}, "strict": False}
    chat = asked(tools=[{"type": "function", **function}], parallel_tool_calls=False)
    assert chat.tools == [{"type": "function", "function": function}]
    assert chat.parallel_tool_calls is False
    assert asked(tools=[]).tools is None


@pytest.mark.parametrize(
    ("choice", "there"),
    [
        ("auto", "auto"),
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]},
            },
        ),
    ],
)
def test_tool_choice(choice: Any, there: Any) -> None:
    assert asked(tool_choice=choice).tool_choice == there


def test_other_fields() -> None:
    chat = asked(
        max_output_tokens=5, temperature=0.5, top_p=0.6, seed=7, reasoning={"effort": "low"}, user="u",
        include=[LOGPROBS], top_logprobs=3, safety_identifier="s",
    )  # fmt: skip
    assert (chat.max_completion_tokens, chat.temperature, chat.top_p, chat.seed) == (5, 0.5, 0.6, 7)
    assert (chat.reasoning_effort, chat.user, chat.safety_identifier) == ("low", "u", "s")
    assert (chat.logprobs, chat.top_logprobs) == (True, 3)
