"""Bad bodies: each row must be refused with this status and param, in the OpenAI shape, echoing nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.apis.openai.schemas import CHAT as CHAT_TABLE
from penstock.gateway.apis.openai.schemas import ChatRequest, CompletionRequest
from penstock.gateway.models.language.dataplane import ServedModel
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import INFO, MODEL, FakeDataPlane

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
CANARY = "c4n4ry"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}


def text(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hi", **fields}


def message(**fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", **fields}])


TWO = (MODEL, ServedModel("second", "root", 0, INFO))
"""With these a request without a model has none."""


async def refused(path: str, body: bytes | dict[str, Any], status: int = 400) -> dict[str, Any]:
    dataplane = FakeDataPlane(models=TWO)
    result: AsgiCall = await call(build_app(dataplane, AppSettings()), path, body)
    assert result.status == status, (result.status, result.bodies)
    assert dataplane.requests == []
    error: dict[str, Any] = result.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert len(b"".join(result.bodies)) <= 4096
    assert CANARY not in json.dumps(error)
    return error


def nested(depth: int) -> bytes:
    return b'{"model":"tiny","prompt":"hi","x":' + b"[" * depth + b"]" * depth + b"}"


def with_number(number: bytes) -> bytes:
    return b'{"model":"tiny","prompt":"hi","temperature":' + number + b"}"


MALFORMED = {
    "empty": b"",
    "not json": b"hello",
    "truncated": b'{"model":"tiny"',
    "trailing text": b'{"model":"tiny","prompt":"hi"} x',
    "trailing comma": b'{"model":"tiny","prompt":"hi",}',
    "single quotes": b"{'model':'tiny'}",
    "array": b"[]",
    "string": b'"hi"',
    "null": b"null",
    "number": b"1",
    "two boms": b'\xef\xbb\xbf\xef\xbb\xbf{"model":"tiny","prompt":"hi"}',
    "utf-16": '{"model":"tiny","prompt":"hi"}'.encode("utf-16"),
    "bad utf-8": b'{"model":"tiny","prompt":"\xff"}',
    "bad utf-8 in an unknown field": b'{"model":"tiny","prompt":"hi","x":"\xff"}',
    "overlong utf-8": b'{"model":"tiny","prompt":"\xc0\xaf"}',
    "utf-8 surrogate": b'{"model":"tiny","prompt":"\xed\xa0\x80"}',
    "lone high surrogate": rb'{"model":"tiny","prompt":"\ud800"}',
    "high surrogate before text": rb'{"model":"tiny","prompt":"\ud800abcdefgh"}',
    "high surrogate before an escape": rb'{"model":"tiny","prompt":"\ud800\u0041"}',
    "lone low surrogate": rb'{"model":"tiny","prompt":"\udc00 and more"}',
    "raw control character": b'{"model":"tiny","prompt":"a\x00b"}',
    "depth 101": nested(100),
    "depth 100 000": nested(100_000),
    "unclosed depth": b"[" * 200_000,
    "unclosed string of quotes": b"[" * 101 + b'"' + b'\\"' * 500_000,
    "nan": with_number(b"NaN"),
    "infinity": with_number(b"Infinity"),
    "minus infinity": with_number(b"-Infinity"),
    "out of range": with_number(b"1e999"),
    "5000 digits": with_number(b"9" * 5000),
    "leading zero": with_number(b"01"),
    "plus sign": with_number(b"+1"),
    "nan in an unknown field": b'{"model":"tiny","prompt":"hi","x":NaN}',
}


@pytest.mark.parametrize("name", MALFORMED)
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_malformed_body(path: str, name: str) -> None:
    await refused(path, MALFORMED[name])


async def test_brackets_in_strings_are_no_depth() -> None:
    prompt = '[{"' * 200 + "\\"
    result = await call(build_app(FakeDataPlane(), AppSettings()), TEXT, text(prompt=prompt))
    assert result.status == 200


async def test_depth_hidden_behind_brackets_in_strings_counts() -> None:
    hidden = b'["]]]]",' * 120 + b"1" + b"]" * 120
    await refused(TEXT, b'{"model":"tiny","prompt":"hi","x":' + hidden + b"}")


async def test_depth_100_is_allowed() -> None:
    result = await call(build_app(FakeDataPlane(), AppSettings()), TEXT, nested(99))
    assert result.status == 200


async def test_of_duplicate_keys_the_last_one_wins() -> None:
    dataplane = FakeDataPlane()
    await call(build_app(dataplane, AppSettings()), TEXT, b'{"model":"tiny","prompt":"hi","n":1,"n":2}')
    assert dataplane.requests[0].n == 2


WRONG_BIASES: list[Any] = [101, -101, "1", True, None, []]
BOTH: dict[str, list[Any]] = {
    "n": [0, -1, 129, 2**31, 10**9, 10**30, 1.5, "2", True, [], {}],
    "temperature": [-0.1, 2.1, 1e308, "1", True, []],
    "top_p": [-0.5, 1.01, "0.5", False],
    "top_k": [-2, 2**31, 1.5, "1", True],
    "min_p": [-0.1, 1.1, "0"],
    "presence_penalty": [-2.1, 2.1, "0"],
    "frequency_penalty": [-2.1, 2.1, True],
    "repetition_penalty": [0, -1, 1e7, "1"],
    "seed": [2**63, -(2**63) - 1, 1.5, "1", True],
    "max_tokens": [0, -2, 2**31, 1.5, "5", True],
    "min_tokens": [-1, 2**31, 1.5, "1"],
    "stop": ["", ["a", ""], ["a"] * 1025, "x" * 16385, ["é" * 8192, "x"], 5, [5], {}, [["a"]]],
    "stop_token_ids": [[-1], [100], [0] * 129, [1.0], ["1"], [True], 5, "5"],
    "logit_bias": [
        *[{key: 1} for key in ("100", "-1", "x", "01", " 1", "1.0", "²", "")],
        *[{"1": bias} for bias in WRONG_BIASES],
        {str(number): 1 for number in range(1025)},
        [1],
    ],
    "allowed_token_ids": [[], [-1], [100], [1.5], 5, "1"],
    "bad_words": [[""], [" "], ["x" * 257], ["x"] * 129, "x", [5]],
    "logits_processors": [["nobody"] * 17, "x", [5], [{"name": "x"}]],
    "prompt_logprobs": [-1, 21, "1", True, 1.5],
    "truncate_prompt_tokens": [0, -2, 2**31, "5", 1.5],
    "truncation_side": ["middle", 5],
    "spaces_between_special_tokens": [1, "true"],
    "priority": [1.5, "1", True],
    "stream": [1, "true", []],
    "stream_options": [True, []],
    "ignore_eos": [1, "true"],
    "cache_salt": ["", "a" * 129, "a@b", "a/b", "a\\b", "a\0b", 5],
    "user": [5, []],
    "model": [5, None, ["tiny"]],
}


@pytest.mark.parametrize(("param", "value"), [(name, value) for name, values in BOTH.items() for value in values])
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_value_out_of_range_or_type(path: str, param: str, value: Any) -> None:
    body = chat() if path == CHAT else text()
    error = await refused(path, {**body, param: value})
    assert error["param"].startswith(param)


UNSUPPORTED_BOTH = [
    ("best_of", 2), ("use_beam_search", True),
    ("structured_outputs", {"json": {}}), ("guided_json", {}), ("guided_regex", "a*"), ("guided_choice", ["a"]),
    ("guided_grammar", "x"), ("guided_decoding", {}), ("prompt_embeds", "AAAA"),
    ("logprobs_mode", "raw"), ("logits_processors", ["x"]), ("regex", "a*"),
    ("json_schema", "{}"), ("response_format", {"type": "json_object"}), ("kv_transfer_params", {}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": CANARY * 99}}),
]  # fmt: skip
UNSUPPORTED_CHAT = [
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("modalities", ["text", "audio"]),
    ("chat_template", "{{ x }}"), ("add_special_tokens", True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "param", "value"),
    [
        *[(path, *row) for path in (CHAT, TEXT) for row in UNSUPPORTED_BOTH],
        *[(CHAT, *row) for row in UNSUPPORTED_CHAT],
        (TEXT, "suffix", "tail"),
    ],
)
async def test_known_but_unsupported_option(path: str, param: str, value: Any) -> None:
    body = chat() if path == CHAT else text()
    error = await refused(path, {**body, param: value})
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")


CHAT_ROWS: list[tuple[dict[str, Any], str | None]] = [
    ({"model": "tiny"}, "messages"),
    ({"messages": []}, "model"),
    (chat(messages=[]), "messages"),
    (chat(messages="hi"), "messages"),
    (chat(messages=["hi"]), "messages[0]"),
    (chat(messages=[{"content": "hi"}]), "messages[0].role"),
    (chat(messages=[{"role": CANARY, "content": "hi"}]), "messages[0].role"),
    (message(content=5), "messages[0].content"),
    (message(content=["hi"]), "messages[0].content[0]"),
    (message(content=[{"text": "hi"}]), "messages[0].content[0].type"),
    (message(content=[{"type": "text"}]), "messages[0].content[0].text"),
    (message(content=[{"type": "refusal"}]), "messages[0].content[0].refusal"),
    (message(role="assistant", tool_calls=[{"id": "c"}]), "messages[0].tool_calls[0].function"),
    (chat(logprobs=1), "logprobs"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs"),
    (chat(logprobs=True, top_logprobs=-1), "top_logprobs"),
    (chat(top_logprobs=1), "top_logprobs"),
    (chat(max_completion_tokens=0), "max_completion_tokens"),
    (chat(max_completion_tokens=3, min_tokens=4), "min_tokens"),
    (chat(prediction={}), "prediction.type"),
    (chat(prediction={"type": "content"}), "prediction.content"),
    (chat(prediction={"type": "text", "content": "x"}), "prediction.type"),
    (chat(chat_template_kwargs={"chat_template": CANARY}), "chat_template_kwargs"),
    (chat(chat_template_kwargs={"tokenize": True}), "chat_template_kwargs"),
    (chat(chat_template_kwargs=[1]), "chat_template_kwargs"),
    (chat(add_generation_prompt=True, continue_final_message=True), "continue_final_message"),
    (message(content="refuse me"), "messages"),
]
TEXT_ROWS: list[tuple[dict[str, Any], str | None]] = [
    ({"model": "tiny"}, "prompt"),
    (text(prompt=None), "prompt"),
    (text(prompt=5), "prompt"),
    (text(prompt=[]), "prompt"),
    (text(prompt=[[]]), "prompt"),
    (text(prompt=[[1], []]), "prompt"),
    (text(prompt=["a", 1]), "prompt"),
    (text(prompt=[1, [1]]), "prompt"),
    (text(prompt=[True]), "prompt[0]"),
    (text(prompt=[1.0]), "prompt[0]"),
    (text(prompt=[-1]), "prompt"),
    (text(prompt=[100]), "prompt"),
    (text(prompt=[[99], [100]]), "prompt"),
    (text(prompt=[10**30]), "prompt"),
    (text(prompt=[["a"]]), "prompt[0][0]"),
    (text(prompt=["a"] * 1025), "prompt"),
    (text(prompt=["a"] * 9, n=128), "n"),
    (text(logprobs=True), "logprobs"),
    (text(logprobs=21), "logprobs"),
    (text(logprobs=-1), "logprobs"),
    (text(echo=1), "echo"),
    (text(min_tokens=17), "min_tokens"),
]


@pytest.mark.parametrize(
    ("path", "body", "param"), [*[(CHAT, *row) for row in CHAT_ROWS], *[(TEXT, *row) for row in TEXT_ROWS]]
)
async def test_bad_combination_or_shape(path: str, body: dict[str, Any], param: str | None) -> None:
    assert (await refused(path, body))["param"] == param


async def test_the_names_of_template_arguments_that_are_not_the_clients() -> None:
    error = await refused(CHAT, chat(chat_template_kwargs={"enable_thinking": True, "messages": []}))
    assert error["message"] == "chat_template_kwargs must not set 'messages'."


async def test_unknown_model_is_404() -> None:
    error = await refused(CHAT, chat(model="other"), status=404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


async def test_model_without_a_template_refuses_chat() -> None:
    dataplane = FakeDataPlane(models=(ServedModel("tiny", "root", 0, INFO, has_chat_template=False),))
    result = await call(build_app(dataplane, AppSettings()), CHAT, chat())
    assert result.status == 400
    assert result.json()["error"]["message"] == "This model has no chat template; use /v1/completions."
    assert dataplane.prompts == []


async def test_values_are_refused_before_the_template_is_rendered() -> None:
    dataplane = FakeDataPlane()
    await call(build_app(dataplane, AppSettings()), CHAT, chat(temperature=3))
    assert dataplane.prompts == []


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_bounds_themselves_are_allowed(path: str) -> None:
    body = chat() if path == CHAT else text()
    edges = {
        "n": 128, "temperature": 2, "top_p": 1, "top_k": 0, "min_p": 1, "seed": -(2**63), "stop": ["x" * 16] * 1024,
        "stop_token_ids": [99] * 128, "logit_bias": {"99": 100}, "presence_penalty": -2, "frequency_penalty": 2,
        "max_tokens": 1, "min_tokens": 1, "cache_salt": "a" * 128,
    }  # fmt: skip
    dataplane = FakeDataPlane()
    result = await call(build_app(dataplane, AppSettings()), path, {**body, **edges})
    assert result.status == 200, result.json()
    assert dataplane.requests[0].params.seed == -(2**63)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
NAMES = st.text(max_size=5)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=8
)
FIELDS = st.sampled_from(sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *CHAT_TABLE}))


@pytest.mark.parametrize("path", [CHAT, TEXT])
@settings(max_examples=80)
@given(changes=st.dictionaries(FIELDS, VALUES, max_size=3))
def test_whatever_the_fields_hold_it_is_never_the_servers_fault(path: str, changes: dict[str, Any]) -> None:
    body = {**(chat() if path == CHAT else text()), **changes}
    result = asyncio.run(call(build_app(FakeDataPlane(), AppSettings()), path, body))
    assert result.status in (200, 400, 404)


@settings(max_examples=80)
@given(body=st.binary(max_size=60) | st.text(alphabet='{}[]":,\\u0dmodeltiny1-.e', max_size=60).map(str.encode))
def test_whatever_the_bytes_are_it_is_never_the_servers_fault(body: bytes) -> None:
    result = asyncio.run(call(build_app(FakeDataPlane(), AppSettings()), TEXT, body))
    assert result.status in (200, 400, 404)
