"""Reasoning and tool calls as the official client sees them: the HTTP front over an engine that writes tags, and stages
that find them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.generating import answer_shape
from penstock.gateway.transports.http.settings import AppSettings
from penstock.gateway.transports.http.stream import ConnectionLimits
from protocol.conftest import ServerThread
from support.dataplane import Setup
from support.stages import STAGES

ANSWER = '<think>Let me look.</think>One moment.<tool>look:{"at": 1}</tool><tool>see:{}</tool>'
ASKED: Any = {"model": "m", "messages": [{"role": "user", "content": "What is there?"}]}
CALLS = [("look", '{"at": 1}'), ("see", "{}")]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    setup = Setup(tmp_path_factory.mktemp("model"), SchedulerConfig(), 256, answer=ANSWER)
    server = ServerThread(setup.plane, AppSettings(), ConnectionLimits()).start()
    server.do(setup.engine.start())
    setup.model.loaded = True
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as made:
        yield made
    setup.engine.core.check_integrity()
    server.do(setup.engine.stop())
    server.close()


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chats name stages of the tests' own."""
    monkeypatch.setattr(answer_shape, "answer_stages", lambda *given, **options: STAGES)


def pieces(client: openai.OpenAI, **fields: Any) -> list[Any]:
    return [
        choice for chunk in client.chat.completions.create(**ASKED, stream=True, **fields) for choice in chunk.choices
    ]


@pytest.mark.usefixtures("staged")
def test_a_message_has_reasoning_text_and_tool_calls(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASKED, n=2)
    for choice in answer.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "One moment."
        assert choice.message.reasoning_content == "Let me look."  # type: ignore[attr-defined]
        calls: Any = choice.message.tool_calls
        assert [(call.type, call.function.name, call.function.arguments) for call in calls] == [
            ("function", *call) for call in CALLS
        ]
    ids = [call.id for choice in answer.choices for call in choice.message.tool_calls or ()]
    assert len(set(ids)) == 4
    assert all(each.startswith("call_") for each in ids)


@pytest.mark.usefixtures("staged")
def test_a_stream_has_them_in_order(client: openai.OpenAI) -> None:
    choices = pieces(client)
    kinds: list[str] = []
    for choice in choices:
        [kind] = [
            name
            for name in ("reasoning_content", "content", "tool_calls")
            if getattr(choice.delta, name, None) is not None
        ]
        if kinds[-1:] != [kind]:
            kinds.append(kind)
    assert kinds == ["content", "reasoning_content", "content", "tool_calls", "content"]
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["tool_calls"]
    calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
    heads = [call for call in calls if call.function.name]
    assert [(call.index, call.type, call.function.name) for call in heads] == [
        (0, "function", "look"),
        (1, "function", "see"),
    ]
    assert len({call.id for call in heads}) == 2
    assert all(call.id is None for call in calls if call not in heads)
    assert len(calls) > 4  # arguments come piece by piece


@pytest.mark.usefixtures("staged")
def test_the_client_s_own_helper_joins_a_stream_to_the_message(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**ASKED, n=2, stream_options={"include_usage": True}) as stream:
        final = stream.get_final_completion()
    for choice in final.choices:
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "One moment."
        assert choice.message.reasoning_content == "Let me look."  # type: ignore[attr-defined]
        calls = choice.message.tool_calls or []
        assert [(call.function.name, call.function.arguments) for call in calls] == CALLS
    answer = client.chat.completions.create(**ASKED, n=2)
    assert final.usage is not None
    assert answer.usage is not None
    assert final.usage.completion_tokens == answer.usage.completion_tokens


@pytest.mark.usefixtures("staged")
def test_every_token_has_its_id_and_logprob_once(client: openai.OpenAI) -> None:
    fields: Any = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    choices = pieces(client, **fields, stream_options={"continuous_usage_stats": True})
    answer = client.chat.completions.create(**ASKED, **fields)
    whole: Any = answer.choices[0]
    ids = [token_id for choice in choices for token_id in getattr(choice, "token_ids", None) or ()]
    assert answer.usage is not None
    assert len(ids) == answer.usage.completion_tokens
    assert ids == whole.token_ids
    shown = [entry.token for choice in choices if choice.logprobs for entry in choice.logprobs.content]
    assert shown == [entry.token for entry in whole.logprobs.content]
    assert len(shown) == len(ids)


@pytest.mark.usefixtures("staged")
def test_a_call_that_is_cut_short_ends_with_length(client: openai.OpenAI) -> None:
    tokens = client.chat.completions.create(**ASKED).usage.completion_tokens  # type: ignore[union-attr]
    answer = client.chat.completions.create(**ASKED, max_tokens=tokens - 4)
    assert answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "length"
    assert [each.finish_reason for each in pieces(client, max_tokens=tokens - 4) if each.finish_reason] == ["length"]


@pytest.mark.usefixtures("staged")
def test_stop_strings_of_which_the_text_has_none(client: openai.OpenAI) -> None:
    stop = ["<tool>", "look", "}", "</think>", *(f"never {number}" for number in range(20))]
    whole, answer = (client.chat.completions.create(**ASKED, **fields) for fields in ({}, {"stop": stop}))
    assert answer.choices[0].message.tool_calls is not None
    assert [(call.function.name, call.function.arguments) for call in answer.choices[0].message.tool_calls] == CALLS
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.usage == whole.usage
    assert pieces(client, stop=stop)[-1].finish_reason == "tool_calls"


@pytest.mark.usefixtures("staged")
def test_without_calls_a_choice_stops_as_ever(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASKED, stop="moment")
    assert answer.choices[0].message.content == "One "
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"
    assert [each.finish_reason for each in pieces(client, stop="moment") if each.finish_reason] == ["stop"]


def test_without_stages_the_text_is_what_the_model_wrote(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**ASKED)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert "reasoning_content" not in (answer.choices[0].message.model_extra or {})


@pytest.mark.usefixtures("staged")
def test_text_completions_show_what_the_model_wrote(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="m", prompt="One", max_tokens=200)
    assert answer.choices[0].text == ANSWER
    chunks = client.completions.create(model="m", prompt="One", max_tokens=200, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
