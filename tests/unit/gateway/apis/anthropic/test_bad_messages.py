"""Bad bodies: each row must be refused with 400 in Anthropic's form, naming the field and echoing nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.apis.anthropic.schemas import UNSUPPORTED, MessagesRequest
from penstock.gateway.models.language.dataplane import ServedModel
from penstock.gateway.models.language.models import ModelParsers
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from penstock.tokenizers import find_reasoning_parser, find_tool_parser
from protocol.asgi_client import call
from protocol.fake_dataplane import INFO, FakeDataPlane

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
CANARY = "c4n4ry"
PARSED = ServedModel(
    "parsed", "root", 0, INFO, parsers=ModelParsers(find_tool_parser("hermes"), find_reasoning_parser("qwen3"))
)
PLAIN = ServedModel("tiny", "root", 0, INFO)
NO_TEMPLATE = ServedModel("bare", "root", 0, INFO, has_chat_template=False)
HI = {"role": "user", "content": "hi"}
TOOL = {"name": "time", "input_schema": {"type": "object"}}
WEB = {"type": "web_search_20250305", "name": "web_search"}
USE = {"type": "tool_use", "id": "1", "name": "time", "input": {}}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "parsed", "max_tokens": 5, "messages": [HI], **fields}


def talk(*messages: Any) -> dict[str, Any]:
    return body(messages=list(messages))


def user(*blocks: Any) -> dict[str, Any]:
    return talk({"role": "user", "content": list(blocks)})


def assistant(*blocks: Any) -> dict[str, Any]:
    return talk(HI, {"role": "assistant", "content": list(blocks)}, HI)


async def refused(path: str, sent: bytes | dict[str, Any], status: int = 400) -> str:
    """The message."""
    dataplane = FakeDataPlane(models=(PARSED, PLAIN, NO_TEMPLATE))
    answer = await call(build_app(dataplane, AppSettings()), path, sent)
    assert answer.status == status, (answer.status, answer.bodies)
    assert dataplane.requests == []
    said = answer.json()
    assert set(said) == {"type", "error", "request_id"}
    assert (said["type"], said["request_id"]) == ("error", answer.headers["request-id"])
    assert set(said["error"]) == {"type", "message"}
    assert said["error"]["type"] == ("invalid_request_error" if status == 400 else "not_found_error")
    assert CANARY not in json.dumps(said)
    assert len(b"".join(answer.bodies)) <= 4096
    return str(said["error"]["message"])


@pytest.mark.parametrize(
    "sent", [b"", b"hello", b"[]", b'{"model":"tiny"', b'{"x":NaN}', b'{"model":"\xff"}', b"[" * 200_000]
)
@pytest.mark.parametrize("path", [PATH, COUNT])
async def test_malformed_body(path: str, sent: bytes) -> None:
    await refused(path, sent)


BLOCK = "messages[0].content[0]"
ROWS: list[tuple[dict[str, Any], str]] = [
    ({"messages": [HI], "max_tokens": 5}, "model"),
    ({"model": "parsed", "max_tokens": 5}, "messages"),
    (body(model=5), "model"),
    (body(model="bare"), "chat template"),
    (body(messages=[]), "messages"),
    (body(messages="hi"), "messages"),
    (talk("hi"), "messages[0]"),
    (talk({"role": "user", "content": 5}), "messages[0].content"),
    (user("hi"), BLOCK),
    (user({"text": "hi"}), f"{BLOCK}.type"),
    (user({"type": "text", "text": 5}), f"{BLOCK}.text"),
    (talk({"role": "assistant", "content": ""}), "messages"),
    (assistant(USE | {"id": 5}), "messages[1].content[0].id"),
    (body(tools=[TOOL | {"name": "x" * 257}]), "tools[0].name"),
    (body(tools=[TOOL | {"name": ""}]), "tools[0].name"),
    (body(tools=[TOOL | {"name": "a\nx-forged: 1"}]), "tools[0].name"),
    (body(tools=[TOOL | {"name": "</tool_call>"}]), "tools[0].name"),
    (body(tools=[{"type": "bash_20250124", "name": "a b"}]), "tools[0].name"),
    (body(tools=[{"type": "bash_20250124", "strict": "yes"}]), "tools[0]"),
    (body(tools=[{"type": "custom", "name": "time"}]), "tools[0]"),
    (body(tools=[WEB], tool_choice={"type": "any"}), "tool_choice"),
    (body(tools=[WEB, TOOL], tool_choice={"type": "tool", "name": "web_search"}), "tool_choice.name"),
    (talk({"role": "user", "content": "refuse me"}), "template refuses"),
    (body(system=5), "system"),
    (body(tools=5), "tools"),
    (body(tools=[5]), "tools[0]"),
    (body(tools=[{}]), "tools[0]"),
    (body(tools=[{"name": "time"}]), "tools[0]"),
    (body(tools=[TOOL | {"name": "no blanks"}]), "tools[0].name"),
    (body(tools=[TOOL | {"input_schema": []}]), "tools[0]"),
    (body(tools=[TOOL | {"input_schema": {"type": "array"}}]), "tools[0].input_schema"),
    (body(tools=[TOOL | {"strict": True}]), "structured output"),
    (body(tools=[TOOL | {"strict": 1}]), "tools[0]"),
    (body(tools=[TOOL | {"name": f"t{number}"} for number in range(513)]), "tools"),
    (body(tools=[TOOL], model="tiny"), "--tool-parser"),
    (body(tools=[TOOL], tool_choice={"type": "any"}), "structured output"),
    (body(tools=[TOOL], tool_choice={"type": "tool", "name": "time"}), "structured output"),
    (body(tools=[TOOL], tool_choice={"type": "tool", "name": CANARY}), "tool_choice.name"),
    (body(tools=[TOOL], tool_choice={"type": "tool"}), "tool_choice.name"),
    (body(tool_choice={"type": "any"}), "there are no tools"),
    (body(tools=[TOOL], tool_choice={"type": CANARY}), "tool_choice.type"),
    (body(tools=[TOOL], tool_choice="auto"), "tool_choice"),
    (body(tools=[TOOL], tool_choice={}), "tool_choice.type"),
    (body(thinking=True), "thinking"),
    (body(output_config={"format": {"type": "json_schema", "schema": {}}}), "structured output"),
    (body(output_format={"type": "json_schema", "schema": {}}), "structured output"),
    (body(output_config={"format": {"type": "json_schema", "schema": CANARY}}), "output_config.format"),
    (body(output_config={"format": {"type": CANARY, "schema": {}}}), "output_config.format"),
]


@pytest.mark.parametrize("path", [PATH, COUNT])
@pytest.mark.parametrize(("sent", "named"), ROWS)
async def test_what_makes_no_prompt(path: str, sent: dict[str, Any], named: str) -> None:
    assert named in await refused(path, sent)


VALUES_OF: dict[str, list[Any]] = {
    "max_tokens": [None, 0, -1, 2**31, 1.5, "5", True],
    "temperature": [-0.1, 2.1, "1", True],
    "top_p": [-0.1, 1.1, "1"],
    "top_k": [-2, 2**31, 1.5, "1"],
    "stop_sequences": ["###", ["a"] * 1025, [""], ["x" * 8193] * 2, [5]],
    "stream": [1, "true"],
    "output_format": [{"type": "json_schema"}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in VALUES_OF.items() for value in values])
async def test_value_out_of_range_or_type(name: str, value: Any) -> None:
    assert name in await refused(PATH, body(**{name: value}))


async def test_max_tokens_is_required() -> None:
    assert "max_tokens" in await refused(PATH, {"model": "parsed", "messages": [HI]})


@pytest.mark.parametrize(
    ("budget", "max_tokens", "kind"),
    [
        (98, 100, "enabled"),  # this model's engine has no grammars
        (0, 100, "enabled"),
        (-1, 100, "enabled"),
        (5, 100, "adaptive"),
    ],
)
async def test_a_budget_that_nothing_here_would_keep(budget: int, max_tokens: int, kind: str) -> None:
    sent = body(max_tokens=max_tokens, thinking={"type": kind, "budget_tokens": budget})
    assert "budget_tokens" in await refused(PATH, sent)


async def test_unknown_model() -> None:
    for path in (PATH, COUNT):
        await refused(path, body(model="other"), status=404)


NEUTRAL: dict[str, Any] = {
    "temperature": 2, "top_p": 0, "top_k": -1, "stop_sequences": ["x" * 256] * 4, "metadata": {"user_id": "me"},
    "thinking": {"type": "enabled", "budget_tokens": 4}, "output_config": {"effort": "max"}, "tools": [],
    "tool_choice": {"type": "auto"}, "container": None, "mcp_servers": [], "speed": "standard", "service_tier": "auto",
    "context_management": {"edits": []}, "cache_control": {"type": "ephemeral"}, "inference_geo": "eu",
}  # fmt: skip


async def test_what_asks_for_nothing_is_taken() -> None:
    dataplane = FakeDataPlane(models=(PARSED,))
    answer = await call(build_app(dataplane, AppSettings()), PATH, body(**NEUTRAL))
    assert answer.status == 200, answer.json()
    [asked] = dataplane.requests
    assert (asked.stop, asked.params.temperature, asked.params.max_tokens) == (("x" * 256,) * 4, 2, 5)
    assert dataplane.prompts[0][1]["kwargs"] == {"enable_thinking": True, "reasoning_effort": "max"}


async def test_values_are_refused_before_the_template_is_rendered() -> None:
    dataplane = FakeDataPlane()
    await call(build_app(dataplane, AppSettings()), PATH, body(model="tiny", temperature=3))
    assert dataplane.prompts == []


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
WORDS = st.sampled_from(["type", "text", "content", "role", "user", "assistant", "tool_use", "tool_result", "name"])
JSON = st.recursive(
    SCALARS | WORDS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4), max_leaves=9
)
FIELDS = st.sampled_from(sorted({*(field.name for field in msgspec.structs.fields(MessagesRequest)), *UNSUPPORTED}))


@pytest.mark.parametrize("path", [PATH, COUNT])
@settings(max_examples=80)
@given(changes=st.dictionaries(FIELDS, JSON, max_size=3))
def test_whatever_the_fields_hold_it_is_never_the_servers_fault(path: str, changes: dict[str, Any]) -> None:
    app = build_app(FakeDataPlane(models=(PARSED,)), AppSettings())
    assert asyncio.run(call(app, path, body(**changes))).status in (200, 400, 404)
