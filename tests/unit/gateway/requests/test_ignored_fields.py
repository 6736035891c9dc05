"""Hints that cannot be followed never cost a request: its answer names them, and they are counted and logged."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from penstock.engines.errors import UnsupportedError
from penstock.gateway.apis.batches.lines import answered, parse_line
from penstock.gateway.metrics.request_metrics import RequestMetrics
from penstock.gateway.models.language.dataplane import ServedModel
from penstock.gateway.requests.call import RequestJournal, be_strict
from penstock.gateway.requests.context import RequestContext
from penstock.gateway.requests.record import MAX_IGNORED
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import INFO, FakeDataPlane

CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"model": "tiny", "messages": HI},
    RESPONSES: {"model": "tiny", "input": "hi"},
    ANTHROPIC: {"model": "tiny", "messages": HI, "max_tokens": 5},
}
MODEL = ServedModel("tiny", "root", 0, INFO, template_variables=frozenset())
"""It has no thoughts, and a template that reads messages alone."""


async def ask(path: str, fields: dict[str, Any], **settings: Any) -> AsgiCall:
    return await call(build_app(FakeDataPlane(models=(MODEL,)), AppSettings(**settings)), path, BODIES[path] | fields)


HINTS: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"verbosity": "low"}, "verbosity"),
    (CHAT, {"reasoning_effort": "low"}, "reasoning_effort"),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
    (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort"),
    (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
]
"""Fields, and which of them the answer names."""


@pytest.mark.parametrize(("path", "fields", "names"), HINTS)
async def test_a_hint_that_is_not_followed_is_named_in_the_answer(
    path: str, fields: dict[str, Any], names: str
) -> None:
    answer = await ask(path, fields)
    assert (answer.status, answer.headers.get("x-penstock-ignored")) == (200, names), answer.json()


@pytest.mark.parametrize(("path", "fields", "names"), HINTS)
async def test_a_strict_server_refuses_it(path: str, fields: dict[str, Any], names: str) -> None:
    answer = await ask(path, fields, journal=RequestJournal(on_begin=[be_strict]))
    assert answer.status == 400
    assert names.split(", ")[0] in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_to_a_request_that_is_used_whole_has_no_such_header(path: str) -> None:
    assert "x-penstock-ignored" not in (await ask(path, {})).headers


async def test_a_response_lists_them_too() -> None:
    answer = await ask(RESPONSES, {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}})
    fields = ["reasoning.effort", "text.verbosity"]
    assert answer.json()["warnings"] == [{"code": "ignored", "param": field} for field in fields]
    assert "warnings" not in (await ask(RESPONSES, {})).json()


def test_a_line_of_a_batch_lists_them_too() -> None:
    line = parse_line(1, b'{"custom_id": "a", "url": "/v1/x", "body": {}}', ["/v1/x"])
    context = RequestContext()
    context.ignore("verbosity", "")
    assert b'"warnings":[{"code":"ignored","param":"verbosity"}]' in answered(
        line, 200, "r", b"{}", context.record.warnings
    )
    assert b"warnings" not in answered(line, 200, "r", b"{}", RequestContext().record.warnings)


def test_fields_are_noted_once_without_their_indexes_and_up_to_a_number() -> None:
    context = RequestContext()
    for number in range(100):
        context.ignore(f"tools[{number}].type", "")
    assert context.record.ignored == ("tools[].type",)
    for number in range(100):
        context.ignore(f"field_{number}", "")
    assert len(context.record.ignored) == MAX_IGNORED


def test_the_next_request_on_a_stream_has_a_list_of_its_own() -> None:
    context = RequestContext(strict=True)
    with pytest.raises(UnsupportedError, match=r"tools\[1\]: nobody runs it") as refused:
        context.ignore("tools[1]", "nobody runs it.")
    assert refused.value.param == "tools[1]"
    assert context.record.ignored == ()
    context.strict = False
    context.ignore("a", "")
    following = context.next_request()
    assert (following.record.ignored, context.record.ignored) == ((), ("a",))


def test_each_field_is_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    counts = RequestMetrics()
    context = RequestContext()
    context.ignore("verbosity", "")
    context.ignore("user", "")
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            counts(context)
        counts(RequestContext())
    assert len(caplog.records) == 2
    [family] = [each for each in counts.collect() if each.name == "penstock_front_ignored_fields"]
    assert {each.labels["field"]: each.value for each in family.samples if each.name.endswith("_total")} == {
        "verbosity": 3,
        "user": 3,
    }


BROKEN = [
    '{"city": "Os',
    '{"city": "Oslo"}}',
    '{"city": "Os\nlo"}',
    '{"x": NaN}',
    "[1]",
    "Oslo",
    "{" * 5000,
    '"text"',
    "7",
]


def conversation(path: str, arguments: str | None) -> dict[str, Any]:
    call = {"name": "weather", "arguments": arguments}
    if path == RESPONSES:
        items = [{"type": "function_call", "call_id": "c", **call}, *_answer("function_call_output")]
        return {"input": [*HI, *items, *HI]}
    calls = [{"id": "c", "type": "function", "function": call}]
    answer = {"role": "tool", "tool_call_id": "c", "content": "invalid"}
    return {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": calls}, answer]}


def _answer(kind: str) -> list[dict[str, Any]]:
    return [{"type": kind, "call_id": "c", "output": "invalid"}]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("arguments", BROKEN)
async def test_a_call_of_the_history_with_broken_arguments_is_shown_with_their_text(path: str, arguments: str) -> None:
    """A model wrote them, or an answer was cut off: the client cannot take them back."""
    dataplane = FakeDataPlane(models=(MODEL,))
    answer = await call(build_app(dataplane, AppSettings()), path, BODIES[path] | conversation(path, arguments))
    assert answer.status == 200, answer.json()
    assert "arguments" in answer.headers["x-penstock-ignored"]
    [shown] = [each["tool_calls"] for each in dataplane.prompts[0][0] if each.get("tool_calls")]
    assert json.loads(shown[0]["function"]["arguments"]) == {"malformed_arguments": arguments}


@pytest.mark.parametrize("arguments", ["", "null", " null ", None])
async def test_a_call_without_arguments_has_none(arguments: str | None) -> None:
    dataplane = FakeDataPlane(models=(MODEL,))
    answer = await call(build_app(dataplane, AppSettings()), CHAT, BODIES[CHAT] | conversation(CHAT, arguments))
    assert (answer.status, "x-penstock-ignored" in answer.headers) == (200, False)
    [shown] = [each["tool_calls"] for each in dataplane.prompts[0][0] if each.get("tool_calls")]
    assert json.loads(shown[0]["function"]["arguments"]) == {}
