"""Parameters of chats and text completions as the official clients send them, against a whole server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from support.server import serving

MODEL = "penstock-demo"
HI: Any = [{"role": "user", "content": "Once upon a time"}]
BUDGET = 12


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Its model begins each answer inside of a thought, and never ends that by itself."""
    with serving("--reasoning-parser", "deepseek_r1", "--tool-parser", "hermes", "--policy", "priority") as process:
        yield process.url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    given: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 40, "seed": 1} | fields
    return client.chat.completions.create(**given, extra_body=extra or {})


@pytest.mark.parametrize("name", ["thinking_token_budget", "max_reasoning_tokens"])
def test_an_answer_follows_the_thought(client: openai.OpenAI, name: str) -> None:
    without = ask(client)
    assert not without.choices[0].message.content
    assert without.usage.completion_tokens_details.reasoning_tokens == 40
    answer = ask(client, {name: BUDGET}, n=3)
    for choice in answer.choices:
        assert choice.message.content.strip()
        assert choice.message.reasoning
    assert 3 * (BUDGET - 2) <= answer.usage.completion_tokens_details.reasoning_tokens <= 3 * (BUDGET + 8)
    first = without.choices[0].message.reasoning
    assert first.startswith(answer.choices[0].message.reasoning)


def test_the_same_in_a_stream(client: openai.OpenAI) -> None:
    whole = ask(client, {"thinking_token_budget": BUDGET})
    chunks = list(ask(client, {"thinking_token_budget": BUDGET}, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == whole.choices[0].message.reasoning
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    thoughts = [usage.completion_tokens_details.reasoning_tokens for usage in (chunks[-1].usage, whole.usage)]
    # A step may bring both, as the forced tokens of the thought's end do: then it is their share of the text.
    assert abs(thoughts[0] - thoughts[1]) <= len("</think>")


def test_structured_output_behind_a_short_thought(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"open": {"type": "boolean"}}, "required": ["open"]}
    wanted: Any = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}},
    }
    for stream in (False, True):
        given = {"thinking_token_budget": 5}
        found = ask(client, given, response_format=wanted, stream=stream, max_tokens=60)
        text = (
            "".join(chunk.choices[0].delta.content or "" for chunk in found)
            if stream
            else found.choices[0].message.content
        )
        assert list(json.loads(text)) == ["open"]


def test_hidden_reasoning_is_counted(client: openai.OpenAI) -> None:
    answer = ask(client, {"thinking_token_budget": BUDGET, "include_reasoning": False})
    assert not hasattr(answer.choices[0].message, "reasoning")
    assert answer.usage.completion_tokens_details.reasoning_tokens >= BUDGET - 2


def test_a_message_follows_the_reasoning_in_responses(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model=MODEL, input="Once", max_output_tokens=40, extra_body={"max_reasoning_tokens": BUDGET}
    )
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output_text.strip()


def test_a_budget_of_anthropic_s_leaves_room_for_the_answer(url: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        for budget, kinds in ((BUDGET, ["thinking", "text"]), (39, ["thinking"])):
            thinking: Any = {"type": "enabled", "budget_tokens": budget}
            message = client.messages.create(model=MODEL, messages=HI, max_tokens=40, thinking=thinking)
            assert [block.type for block in message.content] == kinds


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"thinking_token_budget": "5"}, "thinking_token_budget"),
        ({"thinking_token_budget": 5, "max_reasoning_tokens": 6}, "max_reasoning_tokens"),
    ],
)
def test_bad_budgets(client: openai.OpenAI, extra: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, extra)
    assert refused.value.param == param


def test_tiers_and_metadata(client: openai.OpenAI) -> None:
    for tier, shown in (("auto", "default"), ("flex", "flex"), ("priority", "default")):
        answer = ask(client, service_tier=tier, metadata={"a": "b"}, store=False, user="u", max_tokens=2)
        assert (answer.service_tier, answer.metadata) == (shown, {"a": "b"})


def tokens_of(url: str, text: str) -> list[int]:
    found: list[int] = httpx.post(
        f"{url}/tokenize", json={"model": MODEL, "prompt": text, "add_special_tokens": False}
    ).json()["tokens"]
    return found


def complete(client: openai.OpenAI, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    given: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0} | fields
    [choice] = client.completions.create(**given, extra_body=extra or {}).choices
    return choice


def test_bad_words(client: openai.OpenAI) -> None:
    free = complete(client).text
    words = free.split()
    for bad in (words[0], " ".join(words[1:3])):
        kept = complete(client, {"bad_words": [bad]}).text
        assert bad in free
        assert bad not in kept


def test_allowed_tokens(client: openai.OpenAI, url: str) -> None:
    allowed = tokens_of(url, " yes no")
    choice = complete(client, {"allowed_token_ids": allowed, "return_token_ids": True}, temperature=1)
    assert set(choice.token_ids) <= set(allowed)
    assert len(choice.token_ids) == 12


def test_prompts_are_cut(client: openai.OpenAI, url: str) -> None:
    prompt = tokens_of(url, "Once upon a time there was a dog")
    for extra, kept in (
        ({"truncate_prompt_tokens": 3}, prompt[-3:]),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, prompt[:3]),
        ({"truncate_prompt_tokens": 99}, prompt),
        ({"truncate_prompt_tokens": -1}, prompt),
    ):
        assert complete(client, {**extra, "return_token_ids": True}, prompt=prompt).prompt_token_ids == kept
    long: Any = [{"role": "user", "content": "a dog and a cat " * 20_000}]
    with pytest.raises(openai.BadRequestError):
        ask(client, messages=long, max_tokens=3)
    answer = ask(client, {"truncate_prompt_tokens": -1, "return_token_ids": True}, messages=long, max_tokens=3)
    assert answer.usage.completion_tokens == 3
    assert answer.usage.prompt_tokens == len(answer.prompt_token_ids) > 100
    cut = complete(client, {"truncate_prompt_tokens": 3, "echo": True}, prompt="Once upon a time", max_tokens=1)
    assert not cut.text.startswith("Once")


def test_prompt_logprobs(client: openai.OpenAI, url: str) -> None:
    prompt = tokens_of(url, "Once upon a time")
    answers = [complete(client, {"prompt_logprobs": 2}, prompt=prompt)]
    answers.append(ask(client, {"prompt_logprobs": 2, "return_token_ids": True}))
    for answer, ids in zip(answers, (prompt, answers[1].prompt_token_ids), strict=True):
        first, *others = answer.prompt_logprobs
        assert first is None
        assert len(others) == len(ids) - 1
        for token, place in zip(ids[1:], others, strict=True):
            own = place[str(token)]
            assert own["logprob"] <= 0
            assert len(place) == (2 if own["rank"] <= 2 else 3)
            assert sorted(each["rank"] for each in place.values())[:2] == [1, 2]
    with pytest.raises(openai.BadRequestError, match="stream"):
        ask(client, {"prompt_logprobs": 1}, stream=True)


def test_an_answer_with_what_it_continues(client: openai.OpenAI) -> None:
    begun: Any = [*HI, {"role": "assistant", "content": "there was"}]
    goes_on = {"continue_final_message": True, "add_generation_prompt": False, "thinking_token_budget": 0}
    plain = ask(client, goes_on, messages=begun).choices[0].message.content
    echoed = goes_on | {"echo": True}
    assert ask(client, echoed, messages=begun).choices[0].message.content == "there was" + plain
    chunks = ask(client, echoed, messages=begun, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "there was" + plain


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"bad_words": [""]}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [10**6]}, "allowed_token_ids"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logits_processors": ["nobody"]}, "logits_processors"),
    ],
)
def test_bad_parameters(client: openai.OpenAI, extra: dict[str, Any], param: str) -> None:
    for call in (ask, complete):
        with pytest.raises(openai.BadRequestError) as refused:
            call(client, extra)
        assert refused.value.param == param


def test_predicted_output(client: openai.OpenAI) -> None:
    expected = ask(client, temperature=0).choices[0].message.reasoning
    for content in (expected, [{"type": "text", "text": expected}]):
        prediction: Any = {"type": "content", "content": content}
        answer = ask(client, temperature=0, prediction=prediction)
        details = answer.usage.completion_tokens_details
        assert answer.choices[0].message.reasoning == expected
        assert details.accepted_prediction_tokens > 10
    wrong: Any = {"type": "content", "content": "Nothing of this kind. " * 9}
    assert ask(client, temperature=0, prediction=wrong).choices[0].message.reasoning == expected


@pytest.mark.parametrize(
    ("extra", "param"),
    [({"allowed_token_ids": [5], "bad_words": ["a"]}, "allowed_token_ids"), ({"bad_words": ["y"]}, "bad_words")],
)
def test_what_leaves_nothing_of_a_grammar_is_named(client: openai.OpenAI, extra: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError, match="allows no token") as refused:
        complete(client, {"structured_outputs": {"choice": ["y"]}} | extra)
    assert refused.value.param == param
