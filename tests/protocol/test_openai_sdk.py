"""The official client against a real server. Nothing here depends on which model answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from protocol.conftest import Endpoint

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Count to three."}]


@pytest.fixture(scope="module")
def client(endpoint: Endpoint) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{endpoint.url}/v1", api_key=endpoint.api_key, max_retries=0) as made:
        yield made


def test_a_chat_s_answer_has_every_field(client: openai.OpenAI, endpoint: Endpoint) -> None:
    answer = client.chat.completions.create(model=endpoint.model, messages=MESSAGES, temperature=0, max_tokens=8)
    choice = answer.choices[0]
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.model == endpoint.model
    assert answer.system_fingerprint
    assert answer._request_id


def test_chat_stream_equals_the_answer(client: openai.OpenAI, endpoint: Endpoint) -> None:
    asked: Any = {"model": endpoint.model, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 8}
    answer = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert len({chunk.id for chunk in chunks}) == 1
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == answer.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:-1]] == [answer.choices[0].finish_reason]


def test_several_choices(client: openai.OpenAI, endpoint: Endpoint) -> None:
    chunks = client.chat.completions.create(model=endpoint.model, messages=MESSAGES, n=3, max_tokens=4, stream=True)
    finished = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(finished) == [0, 1, 2]


def test_completions_of_two_prompts_are_the_same_whole_and_streamed(client: openai.OpenAI, endpoint: Endpoint) -> None:
    asked: Any = {"model": endpoint.model, "prompt": ["One", "Two"], "temperature": 0, "max_tokens": 4}
    answer = client.completions.create(**asked)
    assert [choice.index for choice in answer.choices] == [0, 1]
    texts = ["", ""]
    for chunk in client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]


def test_echo_without_tokens_is_the_prompt(client: openai.OpenAI, endpoint: Endpoint) -> None:
    answer = client.completions.create(model=endpoint.model, prompt="One", echo=True, max_tokens=0)
    assert answer.choices[0].text == "One"


def test_the_model_is_listed_and_retrieved(client: openai.OpenAI, endpoint: Endpoint) -> None:
    assert endpoint.model in [model.id for model in client.models.list()]
    assert client.models.retrieve(endpoint.model).object == "model"


async def test_asynchronous_client(endpoint: Endpoint) -> None:
    async with openai.AsyncOpenAI(base_url=f"{endpoint.url}/v1", api_key=endpoint.api_key) as made:
        stream = await made.chat.completions.create(model=endpoint.model, messages=MESSAGES, max_tokens=4, stream=True)
        finish = [chunk.choices[0].finish_reason async for chunk in stream]
    assert finish[-1] in ("stop", "length")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"tools": [{}]}, "tools[0]"),
        ({"messages": []}, "messages"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_bad_requests(client: openai.OpenAI, endpoint: Endpoint, fields: dict[str, Any], param: str) -> None:
    asked: Any = {"model": endpoint.model, "messages": MESSAGES, **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_bad_requests_of_a_stream_are_raised_before_it(client: openai.OpenAI, endpoint: Endpoint) -> None:
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=endpoint.model, messages=MESSAGES, stream=True, top_p=2)


def test_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nobody", messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody")


def test_unknown_route(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.moderations.create(input="x")


def test_wrong_key(client: openai.OpenAI, endpoint: Endpoint) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        client.with_options(api_key="wrong").chat.completions.create(model=endpoint.model, messages=MESSAGES)
    assert caught.value.code == "invalid_api_key"


def test_body_over_the_limit(client: openai.OpenAI, endpoint: Endpoint) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(model=endpoint.model, prompt="x" * (9 << 20))
    assert caught.value.status_code == 413
    assert client.models.list().data  # the server and its connections are well
