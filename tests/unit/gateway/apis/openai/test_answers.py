"""Whole answers, and what a request becomes on its way down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.engines.contract.messages import SamplingParams
from penstock.gateway.models.language.dataplane import Candidate, GenerateRequest, ServedModel, TokenLogprob
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import INFO, MODEL, FakeDataPlane, delta
from support.keys import api_keys

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def chat_body(*contents: Any, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content} for content in contents or ("hi",)]
    return {"model": "tiny", "messages": messages, **fields}


def text_body(prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, **fields}


async def answered(path: str, body: dict[str, Any], **settings: Any) -> tuple[AsgiCall, FakeDataPlane]:
    dataplane = FakeDataPlane()
    result = await call(build_app(dataplane, AppSettings(**settings)), path, body)
    assert result.status == 200, result.json()
    assert all(generation.closed.is_set() for generation in dataplane.generations)
    return result, dataplane


async def wanted(path: str, body: dict[str, Any], **settings: Any) -> GenerateRequest:
    _, dataplane = await answered(path, body, **settings)
    return dataplane.requests[0]


async def test_chat_answer() -> None:
    result, _ = await answered(CHAT, chat_body(n=2))
    answer = result.json()
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][1]["message"] == {"role": "assistant", "content": "one two three", "refusal": None}
    assert answer["choices"][1]["finish_reason"] == "stop"
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 6,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


async def test_completion_answer_counts_prompts_times_n() -> None:
    result, dataplane = await answered(TEXT, text_body(["a", "bc"], n=2))
    answer = result.json()
    assert answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert dataplane.requests[0].prompts == ["a", "bc"]
    assert dataplane.requests[0].n == 2


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ("", [""])],
)
async def test_prompt_shapes(prompt: Any, prompts: Any) -> None:
    assert (await wanted(TEXT, text_body(prompt))).prompts == prompts


async def test_silent_caller_gets_the_models_defaults_then_openais() -> None:
    defaults = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1}
    dataplane = FakeDataPlane(models=(ServedModel("tiny", "root", 0, INFO, default_params=defaults),))
    app = build_app(dataplane, AppSettings())
    await call(app, CHAT, chat_body())
    await call(app, TEXT, text_body(temperature=1.0, top_k=-1))
    chat, text = (request.params for request in dataplane.requests)
    assert (chat.temperature, chat.top_p, chat.top_k, chat.repetition_penalty) == (0.6, 0.95, 20, 1.1)
    assert (text.temperature, text.top_k) == (1.0, 0)
    assert (await wanted(CHAT, chat_body())).params == SamplingParams(max_tokens=0)
    assert (await wanted(TEXT, text_body())).params == SamplingParams(max_tokens=16)


async def test_values_that_openai_takes_and_samplers_do_not() -> None:
    request = await wanted(CHAT, chat_body(top_p=0, logprobs=False, top_logprobs=0))
    assert 0 < request.params.top_p < 1e-6
    assert request.params.logprobs is None


async def test_every_parameter_arrives() -> None:
    request = await wanted(
        CHAT,
        chat_body(
            max_completion_tokens=7,
            max_tokens=9,
            temperature=0,
            top_p=0.5,
            top_k=4,
            min_p=0.1,
            seed=-3,
            stop=["x", "yz"],
            stop_token_ids=[0, 99],
            ignore_eos=True,
            min_tokens=2,
            presence_penalty=-2,
            frequency_penalty=2,
            repetition_penalty=1.5,
            logit_bias={"99": -100, "0": 1.5},
            logprobs=True,
            top_logprobs=3,
            n=3,
            priority=-5,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            cache_salt="salt",
            user="a person",
            unknown_field={"deep": [1]},
        ),
        policy="priority",
    )
    assert request == GenerateRequest(
        model="tiny",
        prompts=[[4, 5]],
        params=SamplingParams(
            max_tokens=7,
            min_tokens=2,
            temperature=0.0,
            top_p=0.5,
            top_k=4,
            min_p=0.1,
            seed=-3,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            repetition_penalty=1.5,
            logit_bias={99: -100.0, 0: 1.5},
            stop_token_ids=(0, 99),
            ignore_eos=True,
            logprobs=3,
        ),
        n=3,
        stop=("x", "yz"),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        add_special_tokens=False,
        priority=-5,
        context=request.context,
        cache_salt="salt",
        session="a person",
    )


async def test_explicit_nulls_mean_silence() -> None:
    fields = (
        "temperature",
        "stop",
        "logit_bias",
        "n",
        "stream",
        "stream_options",
        "tools",
        "user",
        "max_tokens",
        "response_format",
    )
    assert (await wanted(CHAT, chat_body(**dict.fromkeys(fields)))).params == SamplingParams(max_tokens=0)


async def test_values_that_ask_for_nothing_are_accepted() -> None:
    body = chat_body(
        tool_choice="none", response_format={"type": "text"}, modalities=["text"], store=False, best_of=1,
        use_beam_search=False, parallel_tool_calls=True, bad_words=[], service_tier="auto",
    )  # fmt: skip
    await answered(CHAT, body)
    await answered(TEXT, text_body(suffix=None, best_of=1))


async def test_messages_reach_the_template() -> None:
    tool_call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
        {"role": "assistant", "content": None, "tool_calls": [tool_call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]  # fmt: skip
    _, dataplane = await answered(
        CHAT, {"model": "tiny", "messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
    )
    rendered, options = dataplane.prompts[0]
    assert rendered == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "ann"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
        },
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    assert options == {"opens": True, "continues": False, "kwargs": {"enable_thinking": False}}


async def test_continuing_the_last_message_opens_no_new_one() -> None:
    _, dataplane = await answered(CHAT, chat_body(continue_final_message=True))
    assert dataplane.prompts[0][1] == {"opens": False, "continues": True, "kwargs": {}}


async def test_tenant_is_the_owner_of_the_key() -> None:
    dataplane = FakeDataPlane()
    app = build_app(dataplane, AppSettings(keys=api_keys({"red": "k1", "blue": "k2"})))
    await call(app, TEXT, text_body(), headers={"authorization": "Bearer k2"})
    assert dataplane.requests[0].tenant == "blue"


@pytest.mark.parametrize(
    ("policy", "key", "tenant"),
    [("fair", None, "ann"), ("fair", "k1", "red"), ("fcfs", None, ""), ("fcfs", "k1", "red")],
)
async def test_a_fair_server_without_keys_goes_by_the_user(policy: str, key: str | None, tenant: str) -> None:
    dataplane = FakeDataPlane()
    app = build_app(dataplane, AppSettings(policy=policy, keys=api_keys({"red": key} if key else {})))
    await call(app, TEXT, text_body(user="ann"), headers={"authorization": f"Bearer {key}"})
    assert dataplane.requests[0].tenant == tenant


async def test_token_ids_in_answers() -> None:
    chat, _ = await answered(CHAT, chat_body(return_token_ids=True))
    assert chat.json()["prompt_token_ids"] == [4, 5]
    assert chat.json()["choices"][0]["token_ids"] == [3, 4, 6]
    text, _ = await answered(TEXT, text_body([[7], [8, 9]], return_token_ids=True))
    assert [choice["prompt_token_ids"] for choice in text.json()["choices"]] == [[7], [8, 9]]


def entry(token: str, value: float) -> TokenLogprob:
    return TokenLogprob(token, 1, value, list(token.encode()), [Candidate("best", 2, -0.1, [98])])


class EchoingDataPlane(FakeDataPlane):
    """Prompts are three tokens: "x", "y" and "z", whose first has no logprob."""

    async def generate(self, request: GenerateRequest) -> Any:
        generation = await super().generate(request)
        if request.params.prompt_logprobs is not None:
            known = [None, entry("y", -1.0), entry("z", -2.0)]
            generation.prompt_logprobs = [known for _ in request.prompts]
        return generation


async def echoed(prompt: Any = "xyz", **fields: Any) -> AsgiCall:
    dataplane = EchoingDataPlane(
        lambda _: [
            [delta(0, "ab", logprobs=[entry("ab", -3.0)])],
            [delta(0, "c", "stop", logprobs=[replace(entry("c", -4.0), offset=2)])],
        ]
    )
    result = await call(build_app(dataplane, AppSettings()), TEXT, text_body(prompt, echo=True, **fields))
    assert result.status == 200, result.json()
    return result


async def test_echo_puts_the_prompt_first() -> None:
    assert (await echoed()).json()["choices"][0]["text"] == "xyzabc"


async def test_echo_of_token_ids_spells_them() -> None:
    assert (await echoed([1, 2, 3])).json()["choices"][0]["text"] == "<1><2><3>abc"


ECHOED_LOGPROBS = {
    "tokens": ["x", "y", "z", "ab", "c"],
    "token_logprobs": [None, -1.0, -2.0, -3.0, -4.0],
    "top_logprobs": [
        None,
        {"best": -0.1, "y": -1.0},
        {"best": -0.1, "z": -2.0},
        {"best": -0.1, "ab": -3.0},
        {"best": -0.1, "c": -4.0},
    ],
    "text_offset": [0, 1, 2, 3, 5],
}


async def test_echo_with_logprobs() -> None:
    assert (await echoed(logprobs=1)).json()["choices"][0]["logprobs"] == ECHOED_LOGPROBS


async def test_echo_with_logprobs_in_a_stream() -> None:
    events = (await echoed(logprobs=1, stream=True)).events()[:-1]
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert {key: [item for part in parts for item in part[key]] for key in ECHOED_LOGPROBS} == ECHOED_LOGPROBS
    assert [event["choices"][0]["text"] for event in events] == ["xyzab", "c"]


async def test_no_tokens_but_the_echo() -> None:
    answer = (await echoed(logprobs=1, max_tokens=0)).json()
    assert answer["choices"][0]["text"] == "xyz"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["logprobs"]["tokens"] == ["x", "y", "z"]
    assert answer["usage"]["completion_tokens"] == 0


async def test_no_tokens_but_the_echo_in_a_stream() -> None:
    (event, done) = (await echoed(stream=True, max_tokens=0)).events()
    assert event["choices"][0]["text"] == "xyz"
    assert event["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"


async def test_models_are_listed_and_an_unknown_one_is_404() -> None:
    app = build_app(FakeDataPlane(models=(MODEL, ServedModel("org/other", "org/other", 5, INFO))), AppSettings())
    listed = (await call(app, "/v1/models", method="GET")).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["tiny", "org/other"]
    one = (await call(app, "/v1/models/org/other", method="GET")).json()
    assert one == listed["data"][1]
    assert one["max_model_len"] == 64
    assert one["capabilities"] == ["completion", "chat"]
    missing = await call(app, "/v1/models/nobody", method="GET")
    assert missing.status == 404
    assert missing.json()["error"]["code"] == "model_not_found"
