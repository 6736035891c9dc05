"""Structured output as the official clients use it. The demo model knows nothing of JSON or tools: all structure in its
answers comes from the grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import httpx
import openai
import pytest
from pydantic import BaseModel, Field

from support.server import serving

MODEL = "penstock-demo"
HI: Any = [{"role": "user", "content": "Once upon a time"}]
ASKED: Any = {"model": MODEL, "messages": HI, "max_tokens": 200, "seed": 1}


class Tulip(BaseModel):
    """Anthropic's client sends no bounds of numbers."""

    colour: Literal["red", "white"]
    open: bool


class Rose(BaseModel):
    colour: Literal["red", "white"]
    thorns: int = Field(ge=0, le=99)


PARAMETERS = {"type": "object", "properties": {"thorns": {"enum": [1, 2]}}, "required": ["thorns"]}
PARAMETERS["additionalProperties"] = False


def function(name: str, **fields: Any) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": PARAMETERS} | fields}


WRONG: Any = {"type": "function", "function": {"name": "cut", "parameters": {"properties": {"a": {"type": "rose"}}}}}
TOOLS = [function("cut"), function("smell")]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("--tool-parser", "hermes") as process:
        yield process.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_parse_gives_objects_of_the_caller_s_class(client: openai.OpenAI) -> None:
    for seed in range(3):
        completion = client.chat.completions.parse(**ASKED | {"seed": seed}, response_format=Rose, temperature=1.5)
        assert isinstance(completion.choices[0].message.parsed, Rose)
        assert completion.choices[0].finish_reason == "stop"


def test_streams_of_several_choices(client: openai.OpenAI) -> None:
    text = ["", "", ""]
    with client.chat.completions.stream(**ASKED, response_format=Rose, n=3, temperature=1) as stream:
        for event in stream:
            if event.type == "content.delta":
                assert event.parsed is None or isinstance(event.parsed, dict)
            elif event.type == "chunk":
                for choice in event.chunk.choices:
                    text[choice.index] += choice.delta.content or ""
        final = stream.get_final_completion()
    for choice, streamed in zip(final.choices, text, strict=True):
        assert Rose.model_validate_json(streamed) == choice.message.parsed


def test_what_is_cut_off_says_so(client: openai.OpenAI) -> None:
    asked = {**ASKED, "max_tokens": 3}
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**asked, response_format=Rose)


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"response_format": {"type": "json_object"}, "max_tokens": 400}, r"\s*\{[^$]*"),
        ({"structured_outputs": {"regex": "[ab]{3}-[0-9]{2}"}}, "[ab]{3}-[0-9]{2}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"grammar": 'start: "x" /[a-c]{4}/'}}, "x[a-c]{4}"),
        (
            {"structured_outputs": {"json": PARAMETERS, "disable_any_whitespace": True}},
            r'\{"thorns":[12]\}',
        ),
        ({"guided_choice": ["up", "down"]}, "up|down"),
        ({"guided_regex": "[0-9]{4}"}, "[0-9]{4}"),
        ({"guided_json": {"type": "integer", "minimum": 3, "maximum": 5}}, "[345]"),
        ({"response_format": {"type": "text"}}, r"[^$]*"),
        ({"guided_regex": "[ab]{3}-[0-9]{2}", "stop": ["-"]}, "[ab]{3}"),
        ({"response_format": {"type": "json_object", "schema": {"const": 7}}}, "7"),
    ],
)
def test_other_forms(client: openai.OpenAI, fields: dict[str, Any], pattern: str) -> None:
    asked = {name: fields[name] for name in fields if name != "max_tokens"}
    max_tokens = fields.get("max_tokens", 200)
    chat = client.chat.completions.create(**ASKED | {"max_tokens": max_tokens}, extra_body=asked)
    assert re.fullmatch(pattern, chat.choices[0].message.content or "")
    completion = client.completions.create(model=MODEL, prompt="Once", max_tokens=max_tokens, extra_body=asked)
    assert re.fullmatch(pattern, completion.choices[0].text)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "smell"}}], ids=str)
@pytest.mark.parametrize("parallel", [True, False])
def test_forced_calls(client: openai.OpenAI, choice: Any, parallel: bool) -> None:
    asked = ASKED | {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel, "temperature": 1}
    answer = client.chat.completions.create(**asked).choices[0]
    named = isinstance(choice, dict)
    calls = answer.message.tool_calls or []
    assert calls
    if answer.finish_reason == "length":  # the last of many is cut off
        assert parallel
        calls = calls[:-1]
    for call in calls:
        assert call.function.name in (("smell",) if named else ("cut", "smell"))
        assert json.loads(call.function.arguments)["thorns"] in (1, 2)
    if named or not parallel:
        assert (len(calls), answer.finish_reason) == (1, "stop" if named else "tool_calls")
    assert not answer.message.content
    chunks = list(client.chat.completions.create(**asked, stream=True))
    streamed = "".join(
        call.function.arguments or "" for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []
    )
    assert streamed.startswith("".join(call.function.arguments for call in calls))
    assert chunks[-1].choices[0].finish_reason == answer.finish_reason


def test_a_forced_call_that_is_cut_off_is_no_text(client: openai.OpenAI) -> None:
    for limit in (1, 3, 6):
        asked = ASKED | {"tools": TOOLS, "tool_choice": "required", "max_tokens": limit}
        answer = client.chat.completions.create(**asked).choices[0]
        assert (answer.message.content or "", answer.finish_reason) == ("", "length")
        chunks = list(client.chat.completions.create(**asked, stream=True))
        assert not any(chunk.choices[0].delta.content for chunk in chunks)
        assert chunks[-1].choices[0].finish_reason == "length"


def test_allowed_and_strict_tools(client: openai.OpenAI) -> None:
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "cut"}}]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    answer = client.chat.completions.create(**ASKED, tools=TOOLS, tool_choice=choice).choices[0]
    assert {call.function.name for call in answer.message.tool_calls or []} == {"cut"}
    strict = client.chat.completions.create(**ASKED, tools=[function("cut", strict=True)]).choices[0]
    assert strict.message.content or strict.message.tool_calls


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "rose"}}}},
            "response_format",
        ),
        ({"structured_outputs": {"regex": "(("}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"guided_json": {"type": "string", "x-guidance": {"whitespace_pattern": "(("}}}, "guided_json"),
        ({"guided_json": {"type": "string", "x-guidance": {"unheard_of": 1}}}, "guided_json"),
        ({"tools": [WRONG], "tool_choice": "required"}, "tools"),
        ({"guided_choice": []}, "guided_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_structures(client: openai.OpenAI, fields: dict[str, Any], param: str, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASKED, extra_body=fields, stream=stream)
    assert caught.value.param == param


def test_bad_structures_of_responses(client: openai.OpenAI) -> None:
    wrong: Any = {"format": {"type": "json_schema", "name": "a", "schema": {"type": "rose"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="Once", text=wrong)
    assert caught.value.param == "text.format"


def test_anthropic_s_client_gets_objects_and_forced_tools(url: str) -> None:
    tools: Any = [{"name": name, "input_schema": PARAMETERS} for name in ("cut", "smell")]
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as made:
        parsed = made.messages.parse(model=MODEL, max_tokens=200, messages=HI, output_format=Tulip)
        assert isinstance(parsed.parsed_output, Tulip)
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "smell"}):
            forced: Any = {"model": MODEL, "max_tokens": 200, "messages": HI, "tools": tools, "tool_choice": choice}
            message = made.messages.create(**forced)
            assert {block.type for block in message.content} == {"tool_use"}
            assert message.stop_reason == "tool_use"
            assert all(block.to_dict()["input"]["thorns"] in (1, 2) for block in message.content)
        wrong: Any = {"format": {"type": "json_schema", "schema": {"type": "rose"}}}
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema: .*rose"):
            made.messages.create(model=MODEL, max_tokens=9, messages=HI, output_config=wrong)


def test_generate_of_kserve_keeps_to_choices_and_expressions(url: str) -> None:
    for parameters in ({"guided_choice": json.dumps(["up", "down"])}, {"guided_regex": "up|down"}):
        body = {"text_input": "Once", "parameters": {"max_tokens": 50, "exclude_input_in_output": True, **parameters}}
        answer = httpx.post(f"{url}/v2/models/{MODEL}/generate", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["text_output"] in ("up", "down")
