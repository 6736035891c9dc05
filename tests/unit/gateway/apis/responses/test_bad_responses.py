"""Bad bodies: each row must be refused with 400 in OpenAI's form, naming the field and echoing nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.apis.responses.schemas import ENCRYPTED_REASONING, LOGPROBS, UNSUPPORTED, ResponsesRequest
from penstock.gateway.models.language.dataplane import ServedModel
from penstock.gateway.models.language.models import ModelParsers
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from penstock.tokenizers import find_reasoning_parser, find_tool_parser
from protocol.asgi_client import call
from protocol.fake_dataplane import INFO, FakeDataPlane

PATH = "/v1/responses"
CANARY = "c4n4ry"
PARSED = ServedModel(
    "parsed", "root", 0, INFO, parsers=ModelParsers(find_tool_parser("hermes"), find_reasoning_parser("qwen3"))
)
PLAIN = ServedModel("tiny", "root", 0, INFO)
NO_TEMPLATE = ServedModel("bare", "root", 0, INFO, has_chat_template=False)
HI = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "name": "time", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "1", "name": "time", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "1", "output": "noon"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "parsed", "input": "hi", **fields}


def talk(*items: Any) -> dict[str, Any]:
    return body(input=list(items))


def user(*parts: Any) -> dict[str, Any]:
    return talk({"role": "user", "content": list(parts)})


def thought(encoded: Any) -> dict[str, Any]:
    return talk({"type": "reasoning", "summary": [], "encrypted_content": encoded})


async def refused(sent: bytes | dict[str, Any], status: int = 400) -> dict[str, Any]:
    dataplane = FakeDataPlane(models=(PARSED, PLAIN, NO_TEMPLATE))
    answer = await call(build_app(dataplane, AppSettings()), PATH, sent)
    assert answer.status == status, (answer.status, answer.bodies)
    assert dataplane.requests == []
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert CANARY not in json.dumps(error)
    assert len(b"".join(answer.bodies)) <= 4096
    return error


@pytest.mark.parametrize(
    "sent", [b"", b"hello", b"[]", b'{"model":"tiny"', b'{"x":NaN}', b'{"model":"\xff"}', b"[" * 200_000]
)
async def test_malformed_body(sent: bytes) -> None:
    await refused(sent)


PART = "input[0].content[0]"
ROWS: list[tuple[dict[str, Any], str]] = [
    ({"input": "hi"}, "model"),
    ({"model": "parsed"}, "input"),
    (body(model="bare"), "model"),
    (body(input=[]), "input"),
    (body(input=5), "input"),
    (body(input=None), "input"),
    (talk("hi"), "input[0]"),
    (talk({"content": "hi"}), "input[0].role"),
    (talk({"role": "user", "content": 5}), "input[0].content"),
    (talk({"type": CANARY}), "input"),
    (talk({"type": 5}), "input[0].type"),
    (talk({"type": "item_reference"}), "input[0].id"),
    (talk({"type": "item_reference", "id": 5}), "input[0].id"),
    (talk({"type": "mcp_list_tools"}), "input"),
    (talk({"type": "mcp_approval_response", "approval_request_id": CANARY, "approve": True}), "input"),
    (user("hi"), PART),
    (user({"text": "hi"}), f"{PART}.type"),
    (user({"type": "input_text"}), f"{PART}.text"),
    (user({"type": "input_text", "text": 5}), f"{PART}.text"),
    (thought(5), "input[0].encrypted_content"),
    (talk(CALL | {"name": None}, RESULT), "input[0].name"),
    (talk({"role": "user", "content": "refuse me"}), "input"),
    (body(tools=5), "tools"),
    (body(tools=[5]), "tools[0]"),
    (body(tools=[{}]), "tools[0]"),
    (body(tools=[{"type": "function"}]), "tools[0]"),
    (body(tools=[{"type": "function", "function": {"name": "time"}}]), "tools[0]"),
    (body(tools=[TOOL | {"name": "no blanks"}]), "tools[0].name"),
    (body(tools=[TOOL | {"parameters": []}]), "tools[0]"),
    (body(tools=[{"type": "custom"}]), "tools[0].name"),
    (body(tools=[{"type": "custom", "name": "no blanks"}]), "tools[0].name"),
    (body(tools=[{"type": "custom", "name": "c", "format": {"type": CANARY}}]), "tools[0].format"),
    (body(tools=[{"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "lark"}}]), "tools[0].format"),
    (body(tools=[{"type": "namespace", "tools": [TOOL]}]), "tools[0].name"),
    (body(tools=[{"type": "namespace", "name": "n"}]), "tools[0].tools"),
    (body(tools=[{"type": "namespace", "name": "n", "tools": [5]}]), "tools[0].tools[0]"),
    (
        body(
            tools=[{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [TOOL | {"name": "no blanks"}]}]
        ),
        "tools[1].tools[0].name",
    ),
    (body(tools=[{"type": "namespace", "name": "n" * 257, "tools": [TOOL]}]), "tools[0].name"),
    (body(tools=[{"type": "namespace", "name": "n" * 255, "tools": [TOOL]}]), "tools[0].tools[0].name"),
    (body(tools=[{"type": "namespace", "name": "n", "tools": [TOOL | {"parameters": []}]}]), "tools[0].tools[0]"),
    (body(tools=[{"type": "web_search"}] * 1025), "tools"),
    (body(tools=[{"type": "namespace", "name": "n", "tools": [TOOL] * 1024}]), "tools"),
    (body(tools=[{"type": "namespace", "name": "n", "tools": [TOOL] * 513}]), "tools"),
    (body(tools=[TOOL | {"name": f"t{number}"} for number in range(513)]), "tools"),
    (body(tools=[TOOL], model="tiny"), "tools"),
    (body(tools=[TOOL], tool_choice=CANARY), "tool_choice"),
    (body(tools=[TOOL], tool_choice=5), "tool_choice"),
    (body(tools=[TOOL], tool_choice={}), "tool_choice"),
    (body(tools=[TOOL], tool_choice={"type": "web_search"}), "tool_choice"),
    (body(tools=[TOOL, {"type": "web_search"}], tool_choice={"type": "web_search"}), "tool_choice"),
    (body(tools=[{"type": "web_search"}], tool_choice="required"), "tool_choice"),
    (body(tools=[TOOL], tool_choice={"type": CANARY}), "tool_choice"),
    (body(tools=[TOOL], tool_choice={"type": "custom", "name": "c"}), "tool_choice"),
    (body(tools=[TOOL], tool_choice={"type": "function", "name": "time", "namespace": "n"}), "tool_choice"),
    (
        body(tools=[TOOL], tool_choice={"type": "allowed_tools", "mode": "required", "tools": [{"type": "mcp"}]}),
        "tool_choice",
    ),
    (body(tools=[TOOL], tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [TOOL] * 1025}), "tool_choice"),
    (body(tools=[TOOL], tool_choice={"type": "function", "name": 5}), "tool_choice"),
    (body(tools=[TOOL], tool_choice={"type": "allowed_tools", "mode": "auto", "tools": [5]}), "tool_choice"),
    (body(tool_choice="required"), "tool_choice"),
    (body(tool_choice={"type": "function", "name": "time"}), "tool_choice"),
    (body(reasoning={"effort": 5}), "reasoning.effort"),
    (body(text={"verbosity": 5}), "text.verbosity"),
    (body(reasoning="low"), "reasoning"),
    (body(text={"format": {"type": CANARY}}), "text.format.type"),
    (body(text={"format": {"type": "json_schema", "name": "a"}}), "text.format.schema"),
    (body(text={"format": {"type": "json_schema", "schema": {}}}), "text.format.name"),
    (body(text={"format": {"type": "json_schema", "name": "a", "schema": 5}}), "text.format.schema"),
    (body(text={"format": {}}), "text.format.type"),
    (body(include=LOGPROBS), "include"),
    (body(top_logprobs=2), "top_logprobs"),
    (body(top_logprobs=21, include=[LOGPROBS]), "top_logprobs"),
    (body(metadata={str(number): "" for number in range(17)}), "metadata"),
    (body(metadata={"a": "x" * 513}), "metadata"),
    (body(metadata={"a" * 65: "x"}), "metadata"),
    (body(metadata={"a": 5}), "metadata[...]"),
    (body(conversation={"name": CANARY}), "conversation.id"),
    (body(conversation={"id": 5}), "conversation.id"),
    (body(conversation="conv", previous_response_id="resp"), "conversation"),
    (body(background=True, store=False), "store"),
    (body(background=True, temperature=3), "temperature"),
    (body(background=True, stream=True, input=[]), "input"),
]


@pytest.mark.parametrize(("sent", "param"), ROWS)
async def test_what_is_refused(sent: dict[str, Any], param: str) -> None:
    assert (await refused(sent))["param"] == param


async def test_logprobs_that_there_are_not_cost_no_request() -> None:
    """A model whose answers are divided into parts has none: the answer comes without."""
    plane = FakeDataPlane(models=[PARSED])
    answer = await call(build_app(plane, AppSettings()), PATH, body(include=[LOGPROBS], top_logprobs=3))
    assert (answer.status, answer.headers.get("x-penstock-ignored")) == (200, "include")
    assert answer.json()["top_logprobs"] == 0
    assert plane.requests[-1].params.logprobs is None


VALUES_OF: dict[str, list[Any]] = {
    "max_output_tokens": [0, -1, 2**31, 1.5, "5", True],
    "temperature": [-0.1, 2.1, "1", True],
    "top_p": [-0.1, 1.1, "1"],
    "top_k": [-2, 2**31, 1.5],
    "seed": [2**63, "1"],
    "priority": [1.5],
    "cache_salt": ["", "a@b"],
    "chat_template_kwargs": [{"tools": []}, 5],
    "stream": [1, "true"],
    "store": [1, "false"],
    "instructions": [5, ["hi"]],
    "previous_response_id": [5],
    "truncation": ["all", 5],
    "background": [1, "true"],
    "conversation": [5, ["conv"]],
    "prompt": [{"id": "p"}],
    "max_tool_calls": [0, -1, 2**31, "1"],
    "context_management": [5],
    "service_tier": [5],
    "safety_identifier": [5],
    "prompt_cache_key": [5],
    "best_of": [2],
    "stream_options": [{"include_obfuscation": True}],
    "max_tokens": [5],
    "messages": [[HI]],
    "response_format": [{"type": "json_object"}],
    "n": [2],
    "moderation": [{"model": "m"}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in VALUES_OF.items() for value in values])
async def test_value_out_of_range_or_type(name: str, value: Any) -> None:
    assert (await refused(body(**{name: value})))["param"] == name


async def test_unknown_model() -> None:
    await refused(body(model="other"), status=404)


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        ({"previous_response_id": "resp_gone"}, 400, "previous_response_id", "previous_response_not_found"),
        ({"conversation": "resp_gone"}, 404, "conversation", "not_found"),
        ({"input": [{"type": "item_reference", "id": "resp_gone"}]}, 404, "input", "not_found"),
        ({"input": [{"id": "resp_gone"}]}, 404, "input", "not_found"),
    ],
)
async def test_what_a_request_goes_on_from_is_not_there(
    fields: dict[str, Any], status: int, param: str, code: str, background: bool
) -> None:
    error = await refused(body(background=background, **fields), status=status)
    assert (error["param"], error["code"]) == (param, code)
    assert "'resp_gone'" in error["message"]


@pytest.mark.parametrize(
    "fields",
    [{"previous_response_id": "{}"}, {"conversation": "{}"}, {"input": [{"type": "item_reference", "id": "{}"}]}],
)
async def test_an_id_in_an_error_is_cleaned_and_cut(fields: dict[str, Any]) -> None:
    hostile = "<b>\r\nset-cookie: a=b\u2028" + "x" * 5000
    answer = await call(
        build_app(FakeDataPlane(models=(PARSED,)), AppSettings()),
        PATH,
        json.dumps(body(**fields)).replace("{}", json.dumps(hostile)[1:-1]).encode(),
    )
    assert "'bset-cookieab" in answer.json()["error"]["message"]
    assert len(answer.json()["error"]["message"]) < 200


async def test_a_server_that_keeps_nothing() -> None:
    app = build_app(FakeDataPlane(), AppSettings(stored_responses=0))
    for name, value in (("store", True), ("background", True), ("conversation", "c")):
        answer = await call(app, PATH, body(model="tiny", **{name: value}))
        assert (answer.status, answer.json()["error"]["param"]) == (400, name)
    answer = await call(app, PATH, body(model="tiny"))
    assert (answer.status, answer.json()["store"]) == (200, False)
    assert (await call(app, f"{PATH}/{answer.json()['id']}", method="GET")).status == 404


NEUTRAL: dict[str, Any] = {
    "temperature": 2, "top_p": 0, "metadata": {"a" * 64: "x" * 512}, "tools": [], "tool_choice": "auto",
    "include": [], "top_logprobs": 0, "truncation": "disabled", "background": False, "service_tier": "auto",
    "stream_options": {"include_obfuscation": False}, "reasoning": {"effort": None, "summary": None},
    "text": {"format": {"type": "text"}, "verbosity": "medium"}, "prompt_cache_key": "k", "user": "me",
    "safety_identifier": "me", "parallel_tool_calls": True, "prompt_cache_retention": "24h", "conversation": None,
}  # fmt: skip


async def test_what_asks_for_nothing_is_taken() -> None:
    dataplane = FakeDataPlane(models=(PARSED,))
    answer = await call(build_app(dataplane, AppSettings()), PATH, body(max_output_tokens=5, stop="x", **NEUTRAL))
    assert answer.status == 200, answer.json()
    [asked] = dataplane.requests
    assert (asked.stop, asked.params.temperature, asked.params.max_tokens) == (("x",), 2, 5)


@pytest.mark.parametrize("name", ["summary", "generate_summary"])
async def test_a_summary_may_be_left_to_the_server(name: str) -> None:
    asked = body(model="tiny", include=[ENCRYPTED_REASONING], reasoning={name: "auto"})
    answer = await call(build_app(FakeDataPlane(models=(PLAIN,)), AppSettings()), PATH, asked)
    assert answer.status == 200, answer.json()
    assert answer.json()["reasoning"] == {"effort": None, "summary": "auto"}


async def test_values_are_refused_before_the_template_is_rendered() -> None:
    dataplane = FakeDataPlane()
    await call(build_app(dataplane, AppSettings()), PATH, body(model="tiny", temperature=3))
    assert dataplane.prompts == []


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.sampled_from(["", "a", "🙂"])
WORDS = st.sampled_from(
    ["type", "text", "content", "role", "user", "assistant", "function_call", "name", "call_id", "output", "reasoning"]
)
JSON = st.recursive(
    SCALARS | WORDS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4), max_leaves=9
)
FIELDS = st.sampled_from(sorted({*(field.name for field in msgspec.structs.fields(ResponsesRequest)), *UNSUPPORTED}))


@settings(max_examples=150)
@given(changes=st.dictionaries(FIELDS, JSON, max_size=3))
def test_whatever_the_fields_hold_it_is_never_the_servers_fault(changes: dict[str, Any]) -> None:
    app = build_app(FakeDataPlane(models=(PARSED,)), AppSettings())
    assert asyncio.run(call(app, PATH, body(**changes))).status in (200, 400, 404)
