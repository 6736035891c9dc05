"""Requests of Anthropic's API for models of other servers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.gateway.apis.anthropic.messages import upstream_chat
from penstock.gateway.apis.anthropic.schemas import MessagesRequest
from penstock.gateway.requests.context import RequestContext

MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def fields(**given: Any) -> dict[str, Any]:
    body = {"model": "m", "max_tokens": 2000, "messages": MESSAGES} | given
    found = dict(upstream_chat(msgspec.convert(body, MessagesRequest), RequestContext()).fields)
    return {name: value for name, value in found.items() if name not in ("messages", "max_tokens")}


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        ({}, {}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"thinking": {"type": "disabled"}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        (
            {"thinking": {"type": "enabled", "budget_tokens": 1024}},
            {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": 1024},
        ),
        ({"thinking": {"type": "deep"}}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 5000}}, {"chat_template_kwargs": {"enable_thinking": True}}),
        ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, {"thinking_token_budget": 5}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"output_config": {"effort": "so so"}}, {}),
        ({"metadata": {"user_id": 5}, "mcp_servers": [{"type": "url"}]}, {}),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True},
                }
            },
        ),
        ({"top_k": 5, "metadata": {"user_id": "u"}}, {"top_k": 5, "user": "u"}),
        ({"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "none"}}, {}),
    ],
)
def test_fields_become_those_of_other_servers_chats_or_are_left_out(
    given: dict[str, Any], sent: dict[str, Any]
) -> None:
    assert fields(**given) == sent


def test_tools_become_functions_and_the_server_s_own_are_left_out() -> None:
    web = {"type": "web_search_20250305", "name": "web_search"}
    tools = [web, {"name": "f", "input_schema": SCHEMA, "strict": True}, {"name": "g", "input_schema": SCHEMA}]
    sent = fields(tools=tools, tool_choice={"type": "tool", "name": "g"})
    strict = {"name": "f", "parameters": SCHEMA, "strict": True}
    other = {"name": "g", "parameters": SCHEMA}
    assert sent["tools"] == [{"type": "function", "function": each} for each in (strict, other)]
    assert sent["tool_choice"] == {"type": "function", "function": {"name": "g"}}


def test_earlier_thoughts_are_not_sent() -> None:
    thought = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "yes"}]
    messages = [*MESSAGES, {"role": "assistant", "content": thought}, *MESSAGES]
    body = {"model": "m", "max_tokens": 5, "messages": messages}
    sent = upstream_chat(msgspec.convert(body, MessagesRequest), RequestContext()).fields["messages"]
    assert sent == [*MESSAGES, {"role": "assistant", "content": "yes"}, *MESSAGES]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"messages": [*MESSAGES, {"role": "assistant", "content": "so"}]}, UnsupportedError),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, InvalidRequestError),
        ({"max_tokens": 0}, InvalidRequestError),
    ],
)
def test_what_is_refused(given: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        fields(**given)
