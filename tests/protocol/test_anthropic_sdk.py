"""The official client of Anthropic, against a script, a whole server process, and an engine that calls tools."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from penstock.engines.errors import QueueFullError
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.models.language.models import choose_parsers
from penstock.gateway.transports.http.settings import AppSettings
from penstock.gateway.transports.http.stream import ConnectionLimits
from penstock.tokenizers import ChatTemplate
from protocol.conftest import Endpoint, Serve, ServerThread
from protocol.fake_dataplane import FakeDataPlane
from support.dataplane import Setup

HI: Any = [{"role": "user", "content": "What is the weather?"}]
ANSWER = (
    "<think>They want the weather.</think>I will look.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
)
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }};{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}\n{% endfor %}"
)
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS: Any = [{"name": name, "description": "d", "input_schema": SCHEMA} for name in ("weather", "time")]


def client(url: str, key: str | None = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def asked(endpoint: Endpoint) -> Iterator[tuple[anthropic.Anthropic, str]]:
    with client(endpoint.url, endpoint.api_key) as made:
        yield made, endpoint.model


def test_a_message(asked: tuple[anthropic.Anthropic, str]) -> None:
    made, model = asked
    message = made.messages.create(model=model, max_tokens=8, messages=HI, system="Be kind.", stop_sequences=["\x00"])
    assert (message.type, message.role, message.model) == ("message", "assistant", model)
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert message.usage.input_tokens > 0
    assert message.usage.output_tokens > 0
    assert message._request_id
    [block] = message.content
    assert block.type == "text"


def test_a_stream_is_what_the_whole_answer_is(asked: tuple[anthropic.Anthropic, str]) -> None:
    made, model = asked
    fields: Any = {"model": model, "max_tokens": 8, "messages": HI, "extra_body": {"temperature": 0}}
    whole = made.messages.create(**fields)
    with made.messages.stream(**fields) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
    assert whole.content[0].to_dict()["text"] == text
    assert (final.stop_reason, final.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)


def test_the_tokens_of_a_prompt(asked: tuple[anthropic.Anthropic, str]) -> None:
    made, model = asked
    counted = made.messages.count_tokens(model=model, messages=HI).input_tokens
    usage = made.messages.create(model=model, max_tokens=1, messages=HI).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_the_models(asked: tuple[anthropic.Anthropic, str]) -> None:
    made, model = asked
    listed = list(made.models.list(limit=1))
    assert model in [each.id for each in listed]
    assert made.models.retrieve(model) in listed
    with pytest.raises(anthropic.NotFoundError):
        made.models.retrieve("other")


@pytest.mark.parametrize(
    ("fields", "error", "kind"),
    [
        ({"model": "other"}, anthropic.NotFoundError, "not_found_error"),
        ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error"),
        ({"messages": []}, anthropic.BadRequestError, "invalid_request_error"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_errors_have_their_classes(
    asked: tuple[anthropic.Anthropic, str],
    fields: dict[str, Any],
    error: type[anthropic.APIStatusError],
    kind: str,
    stream: bool,
) -> None:
    made, model = asked
    with pytest.raises(error) as refused:
        made.messages.create(**{"model": model, "max_tokens": 8, "messages": HI, "stream": stream} | fields)
    assert refused.value.type == kind
    assert refused.value.request_id


def test_a_wrong_key(endpoint: Endpoint) -> None:
    with client(endpoint.url, "wrong") as made, pytest.raises(anthropic.AuthenticationError):
        made.messages.create(model=endpoint.model, max_tokens=8, messages=HI)


def test_a_bearer_token_is_a_key_too(endpoint: Endpoint) -> None:
    with anthropic.Anthropic(base_url=endpoint.url, auth_token=endpoint.api_key, max_retries=0) as made:
        assert made.messages.count_tokens(model=endpoint.model, messages=HI).input_tokens


def test_a_server_with_too_much_to_do(serve: Serve) -> None:
    dataplane = FakeDataPlane()
    dataplane.admit = QueueFullError("full")
    url = f"http://127.0.0.1:{serve(dataplane).port}"
    with client(url) as made, pytest.raises(anthropic.OverloadedError) as refused:
        made.messages.create(model="tiny", max_tokens=8, messages=HI)
    assert refused.value.type == "overloaded_error"


class Rig:
    """A model that thinks and calls tools, whatever it is asked."""

    def __init__(self, folder: Path) -> None:
        self.setup = Setup(folder, SchedulerConfig(), 256, answer=ANSWER)
        self.setup.model.chat_template = ChatTemplate(TEMPLATE, {})
        self.setup.model.parsers = choose_parsers("hermes", "qwen3", None, self.setup.tokenizer)
        self.server = ServerThread(self.setup.plane, AppSettings(), ConnectionLimits()).start()
        self.server.do(self.setup.engine.start())
        self.setup.model.loaded = True
        self.client = client(f"http://127.0.0.1:{self.server.port}")

    def create(self, **fields: Any) -> anthropic.types.Message:
        message: anthropic.types.Message = self.client.messages.create(
            **{"model": "m", "max_tokens": 190, "messages": HI} | fields
        )
        return message

    def close(self) -> None:
        self.client.close()
        self.setup.engine.core.check_integrity()
        self.server.do(self.setup.engine.stop())
        self.server.close()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    running = Rig(tmp_path_factory.mktemp("model"))
    yield running
    running.close()


def shown(message: Any) -> list[dict[str, Any]]:
    """The content without the ids that the server gives."""
    return [{name: each for name, each in block.to_dict().items() if name != "id"} for block in message.content]


CONTENT = [
    {"type": "thinking", "thinking": "They want the weather.", "signature": "unsigned"},
    {"type": "text", "text": "I will look.\n"},
    {"type": "tool_use", "name": "weather", "input": {"city": "Bern"}},
    {"type": "tool_use", "name": "time", "input": {}},
]


def test_a_conversation_with_tools(rig: Rig) -> None:
    message = rig.create(tools=TOOLS)
    assert message.stop_reason == "tool_use"
    assert shown(message) == CONTENT
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "Rain."}]}
        for block in message.content
        if block.type == "tool_use"
    ]
    turns = [*HI, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    assert shown(rig.create(tools=TOOLS, messages=turns, max_tokens=9))


def test_a_stream_of_tool_calls_adds_up_to_the_same(rig: Rig) -> None:
    with rig.client.messages.stream(model="m", max_tokens=190, messages=HI, tools=TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert shown(final) == CONTENT
    assert final.stop_reason == "tool_use"
    assert kinds[-1] == "message_stop"


def test_one_call_at_a_time_and_thoughts_left_out(rig: Rig) -> None:
    one: Any = {"type": "auto", "disable_parallel_tool_use": True}
    message = rig.create(tools=TOOLS, tool_choice=one, thinking={"type": "adaptive", "display": "omitted"})
    assert shown(message) == CONTENT[1:3]


def test_without_tools_calls_are_text(rig: Rig) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": {"type": "none"}}):
        message = rig.create(**fields)
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.stop_reason == "end_turn"


def test_a_stop_sequence(rig: Rig) -> None:
    message = rig.create(stop_sequences=["look"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "look")
    assert shown(message)[1] == {"type": "text", "text": "I will "}


def test_a_call_that_was_cut_off(rig: Rig) -> None:
    message = rig.create(tools=TOOLS, max_tokens=120)
    assert message.stop_reason == "max_tokens"
    with rig.client.messages.stream(model="m", max_tokens=120, messages=HI, tools=TOOLS) as stream:
        assert stream.get_final_message().stop_reason == "max_tokens"


def test_what_claude_code_sends_to_a_server_of_anthropic_s(rig: Rig) -> None:
    search: Any = {"type": "web_search_20250305", "name": "web_search"}
    turns: Any = [
        *HI,
        {
            "role": "assistant",
            "content": [
                {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "weather"}},
                {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
                {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Bern"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}]},
        {"role": "system", "content": "Be brief."},
    ]
    with rig.client.messages.with_streaming_response.create(
        model="m", max_tokens=190, messages=turns, tools=[*TOOLS, search], metadata={"user_id": "me"}
    ) as answer:
        assert shown(answer.parse())[:2] == CONTENT[:2]
        ignored = answer.headers["x-penstock-ignored"].split(", ")
    assert ignored == ["messages[].content[]", "messages[].content[].content[]", "tools[]"]


def test_a_prompt_with_cache_control_stays_cached(rig: Rig) -> None:
    """In one cache with others that push each other out."""
    kept, other = [[{"type": "text", "text": char * 150}] for char in "kx"]
    control = {"type": "ephemeral", "ttl": "1h"}
    rig.create(system=[kept[0] | {"cache_control": control}], max_tokens=1)
    rig.create(system=other, max_tokens=1)
    for char in "abcdefgh":
        rig.create(system=char * 200, max_tokens=1)
    lost, found = [rig.create(system=system, max_tokens=1).usage.cache_read_input_tokens for system in (other, kept)]
    assert lost == 4, "the block that all of these prompts begin with"
    assert found is not None
    assert found > 150


def test_tools_count_as_tokens(rig: Rig) -> None:
    count = rig.client.messages.count_tokens
    alone = count(model="m", messages=HI).input_tokens
    assert count(model="m", messages=HI, tools=TOOLS).input_tokens > alone
