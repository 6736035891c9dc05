"""OpenAI's client on the Responses API, against a whole server process and an engine that thinks and calls tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.models.language.models import choose_parsers
from penstock.gateway.transports.http.settings import AppSettings
from penstock.gateway.transports.http.stream import ConnectionLimits
from penstock.tokenizers import ChatTemplate
from protocol.conftest import Endpoint, ServerThread
from support.dataplane import Setup
from support.keys import api_keys
from support.responses import accumulated, validated_response

HI: Any = "What is the weather?"
ANSWER = (
    "<think>They want the weather.</think>I will look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.reasoning_content }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}\n{% endfor %}"
)
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [
    {"type": "function", "name": name, "description": "d", "parameters": SCHEMA, "strict": False}
    for name in ("weather", "time")
]


def client(url: str, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def asked(endpoint: Endpoint) -> Iterator[tuple[openai.OpenAI, str]]:
    with client(endpoint.url, endpoint.api_key) as made:
        yield made, endpoint.model


def test_a_response(asked: tuple[openai.OpenAI, str]) -> None:
    made, model = asked
    response = made.responses.create(model=model, input=HI, instructions="Be kind.", max_output_tokens=8)
    assert validated_response(response.to_dict(mode="json"))
    assert response.status in ("completed", "incomplete")
    assert response.output_text
    assert response.usage is not None
    assert response.usage.output_tokens > 0


def test_a_stream_is_what_the_whole_response_is(asked: tuple[openai.OpenAI, str]) -> None:
    made, model = asked
    fields: Any = {"model": model, "max_output_tokens": 8, "input": HI, "temperature": 0}
    whole = made.responses.create(**fields)
    with made.responses.create(**fields, stream=True) as stream:
        events = [event.to_dict(mode="json") for event in stream]
    [item] = accumulated(events)
    assert item["content"][0]["text"] == whole.output_text
    end = events[-1]["response"]
    assert (end["status"], end["usage"]["output_tokens"]) == (whole.status, whole.usage and whole.usage.output_tokens)


class Pick(pydantic.BaseModel):
    color: Literal["red", "blue"]
    big: bool


@pytest.mark.parametrize("endpoint", ["demo"], indirect=True)
def test_an_answer_of_the_shape_that_was_asked_for(asked: tuple[openai.OpenAI, str]) -> None:
    made, model = asked
    fields: Any = {"model": model, "input": HI, "text_format": Pick, "max_output_tokens": 60}
    assert made.responses.parse(**fields).output_parsed
    with made.responses.stream(**fields) as stream:
        assert stream.get_final_response().output_parsed


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"max_output_tokens": 0}, openai.BadRequestError, "max_output_tokens"),
        ({"background": True, "store": False}, openai.BadRequestError, "store"),
        ({"conversation": "conv_x"}, openai.NotFoundError, "conversation"),
        ({"previous_response_id": "resp_x"}, openai.BadRequestError, "previous_response_id"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_errors_have_their_classes(
    asked: tuple[openai.OpenAI, str],
    fields: dict[str, Any],
    error: type[openai.APIStatusError],
    param: str,
    stream: bool,
) -> None:
    made, model = asked
    with pytest.raises(error) as refused:
        made.responses.create(**{"model": model, "input": HI, "stream": stream} | fields)
    assert refused.value.param == param


class Rig:
    """A model that thinks and calls tools, whatever it is asked; for two tenants."""

    def __init__(self, folder: Path) -> None:
        self.setup = Setup(folder, SchedulerConfig(), 256, answer=ANSWER)
        self.setup.model.chat_template = ChatTemplate(TEMPLATE, {})
        self.setup.model.parsers = choose_parsers("hermes", "qwen3", None, self.setup.tokenizer)
        settings = AppSettings(keys=api_keys({"red": "key-one", "blue": "key-two"}))
        self.server = ServerThread(self.setup.plane, settings, ConnectionLimits()).start()
        self.server.do(self.setup.engine.start())
        self.setup.model.loaded = True
        url = f"http://127.0.0.1:{self.server.port}"
        self.client, self.other = client(url, "key-one"), client(url, "key-two")

    def create(self, **fields: Any) -> openai.types.responses.Response:
        response: openai.types.responses.Response = self.client.responses.create(
            **{"model": "m", "max_output_tokens": 190, "input": HI} | fields
        )
        return response

    def close(self) -> None:
        self.client.close()
        self.other.close()
        self.setup.engine.core.check_integrity()
        self.server.do(self.setup.engine.stop())
        self.server.close()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    running = Rig(tmp_path_factory.mktemp("model"))
    yield running
    running.close()


def shown(items: Any) -> list[tuple[Any, ...]]:
    """Items without the ids that the server gives."""
    found: list[tuple[Any, ...]] = []
    for item in items:
        if item.type == "function_call":
            found.append((item.type, item.name, item.arguments))
        else:
            found.append((item.type, "".join([part.text for part in item.content])))
    return found


OUTPUT = [
    ("reasoning", "They want the weather."),
    ("message", "I will look.\n"),
    ("function_call", "weather", '{"city": "Bern"}'),
    ("function_call", "time", "{}"),
]


def outputs(response: Any) -> Any:
    calls = [item for item in response.output if item.type == "function_call"]
    return [{"type": "function_call_output", "call_id": call.call_id, "output": "Rain."} for call in calls]


def test_a_conversation_with_tools(rig: Rig) -> None:
    response = rig.create(tools=TOOLS)
    assert response.status == "completed"
    assert shown(response.output) == OUTPUT
    assert "encrypted_content" not in response.output[0].to_dict()
    assert response.usage is not None
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    turns = [{"role": "user", "content": HI}, *response.output, *outputs(response)]
    assert rig.create(tools=TOOLS, input=turns, max_output_tokens=9).output


def test_a_stream_of_tool_calls_adds_up_to_the_same(rig: Rig) -> None:
    with rig.client.responses.stream(model="m", max_output_tokens=190, input=HI, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert shown(final.output) == OUTPUT
    assert kinds[-1] == "response.completed"


def test_a_conversation_that_the_server_keeps(rig: Rig) -> None:
    first = rig.create(tools=TOOLS, instructions="Be kind.")
    second = rig.create(previous_response_id=first.id, input=outputs(first), max_output_tokens=9)
    third = rig.create(previous_response_id=second.id, input="So?", max_output_tokens=9)
    assert third.previous_response_id == second.id
    prompts = [response.usage.input_tokens for response in (first, second, third) if response.usage]
    assert prompts == sorted(set(prompts)), "each has what was before"
    listed = list(rig.client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.type for item in listed] == ["message", *[kind for kind, *_ in OUTPUT], *["function_call_output"] * 2]


def test_the_tokens_of_a_prompt(rig: Rig) -> None:
    first = rig.create(tools=TOOLS, instructions="Be kind.")
    follow: Any = {"model": "m", "previous_response_id": first.id, "input": outputs(first)}
    second = rig.create(**follow, max_output_tokens=9)
    count = rig.client.responses.input_tokens.count
    for response, fields in ((first, {"input": HI, "tools": TOOLS, "instructions": "Be kind."}), (second, follow)):
        counted = count(**{"model": "m"} | fields)
        assert response.usage is not None
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", response.usage.input_tokens)
    with pytest.raises(openai.BadRequestError) as refused:
        count(model="m", input=HI, text={"format": {"type": "yaml"}})  # type: ignore[typeddict-item]
    assert (refused.value.param or "").startswith("text.format")


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_that_only_the_client_keeps(rig: Rig, stream: bool) -> None:
    include: Any = ["reasoning.encrypted_content"]
    response = rig.create(tools=TOOLS, store=False, include=include, reasoning={"summary": "auto"}, stream=stream)
    if stream:
        response = next(event for event in response if event.type == "response.completed").response
    assert shown(response.output) == OUTPUT
    thought, *others = response.to_dict()["output"]
    assert thought["summary"] == []
    lengths = []
    for name in ("content", "encrypted_content", "status"):
        sent = {"type": "reasoning", "id": thought["id"], "summary": [], name: thought[name]}
        turns: Any = [{"role": "user", "content": HI}, sent, *others, *outputs(response)]
        lengths.append(rig.client.responses.input_tokens.count(model="m", input=turns).input_tokens)
    whole, encoded, without = lengths
    assert whole == encoded > without


def test_what_is_kept_is_shown_and_deleted(rig: Rig) -> None:
    response = rig.create()
    assert rig.client.responses.retrieve(response.id).to_dict() == response.to_dict()
    with pytest.raises(openai.BadRequestError):
        rig.client.responses.cancel(response.id)
    rig.client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        rig.client.responses.retrieve(response.id)


@pytest.mark.parametrize("limit", [9, 190])
def test_a_stream_is_kept_too(rig: Rig, limit: int) -> None:
    with rig.client.responses.create(model="m", max_output_tokens=limit, input=HI, stream=True) as stream:
        *_, last = stream
    assert last.type == ("response.incomplete" if limit == 9 else "response.completed")
    assert rig.client.responses.retrieve(last.response.id).to_dict() == last.response.to_dict()


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_to_be_kept_is_not(rig: Rig, stream: bool) -> None:
    kept = rig.client.responses.create(model="m", max_output_tokens=9, input=HI, store=False, stream=stream)
    response_id = next(iter(kept)).response.id if stream else kept.id
    with pytest.raises(openai.NotFoundError):
        rig.client.responses.retrieve(response_id)


def test_nobody_else_is_told_of_a_response(rig: Rig) -> None:
    response = rig.create()
    for call in (
        rig.other.responses.retrieve,
        rig.other.responses.delete,
        rig.other.responses.cancel,
        rig.other.responses.input_items.list,
    ):
        with pytest.raises(openai.NotFoundError):
            call(response.id)
    with pytest.raises(openai.BadRequestError, match="not found"):
        rig.other.responses.create(model="m", input=HI, previous_response_id=response.id)
    assert rig.client.responses.retrieve(response.id).id == response.id


def test_an_answer_that_was_cut_off(rig: Rig) -> None:
    response = rig.create(max_output_tokens=9)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[-1].to_dict()["status"] == "incomplete"


def test_one_call_at_a_time(rig: Rig) -> None:
    assert shown(rig.create(tools=TOOLS, parallel_tool_calls=False).output) == OUTPUT[:3]


def test_without_tools_calls_are_text(rig: Rig) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
        assert [item.type for item in rig.create(**fields).output] == ["reasoning", "message"]
