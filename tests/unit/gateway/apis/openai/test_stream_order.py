"""The exact order of a stream, and what leaves together."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engines.errors import DeadlineExceededError, EngineDeadError, QueueFullError
from penstock.gateway.models.language.dataplane import (
    Candidate,
    ChoiceDelta,
    GenerateRequest,
    ServedModel,
    TokenLogprob,
)
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import INFO, FakeDataPlane, Step, delta

CHAT = "/v1/chat/completions"


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True, **fields}


async def streamed(*steps: Step, path: str = CHAT, **fields: Any) -> AsgiCall:
    app = build_app(FakeDataPlane(lambda _: steps), AppSettings())
    body = chat_body(**fields)
    if path != CHAT:
        body["prompt"] = "hi"
    return await call(app, path, body)


def chunk(index: int, delta_fields: dict[str, Any], finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"index": index, "delta": delta_fields, "logprobs": None, "finish_reason": finish, **fields}


async def test_chat_stream_golden() -> None:
    result = await streamed(
        [delta(0, "Hel")],
        [delta(0, "lo")],
        [delta(0, "!", "stop", stop_reason="END")],
        stream_options={"include_usage": True},
    )
    assert result.status == 200
    assert result.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = result.events()
    assert events.pop() == "[DONE]"
    head = {key: events[0][key] for key in ("id", "object", "created", "model", "system_fingerprint")}
    assert head["id"].startswith("chatcmpl-")
    assert head["object"] == "chat.completion.chunk"
    usage = {
        "prompt_tokens": 2,
        "completion_tokens": 3,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
    running = {**head, "usage": None}
    assert events == [
        {**running, "choices": [chunk(0, {"role": "assistant", "content": ""})]},
        {**running, "choices": [chunk(0, {"content": "Hel"})]},
        {**running, "choices": [chunk(0, {"content": "lo"})]},
        {**running, "choices": [chunk(0, {"content": "!"}, "stop", stop_reason="END")]},
        {**head, "choices": [], "usage": usage},
    ]


async def test_completion_stream_golden() -> None:
    result = await streamed([delta(0, "a")], [delta(0, "b", "length")], path="/v1/completions")
    first, last, done = result.events()
    assert done == "[DONE]"
    assert first["object"] == "text_completion"
    assert first["id"].startswith("cmpl-")
    assert first["choices"] == [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None}]
    assert last["choices"] == [
        {"index": 0, "text": "b", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]


async def test_choices_interleave_in_arrival_order_after_all_roles() -> None:
    result = await streamed([delta(1, "b1")], [delta(0, "a1"), delta(1, "b2", "stop")], [delta(0, "a2", "length")], n=2)
    choices = [event["choices"][0] for event in result.events()[:-1]]
    seen = [(each["index"], each["delta"]["content"], each["finish_reason"]) for each in choices]
    assert seen == [
        (0, "", None),
        (1, "", None),
        (1, "b1", None),
        (0, "a1", None),
        (1, "b2", "stop"),
        (0, "a2", "length"),
    ]


async def test_what_is_ready_together_leaves_in_one_send() -> None:
    result = await streamed(
        [delta(0, "a"), delta(1, "b")],
        [delta(0, "c"), delta(1, "d")],
        [delta(0, "", "stop"), delta(1, "", "stop")],
        n=2,
    )
    assert [body.count(b"data: ") for body in result.bodies] == [4, 2, 3]
    assert result.complete


async def test_last_delta_usage_and_done_leave_in_one_send() -> None:
    result = await streamed([delta(0, "a")], [delta(0, "b", "stop")], stream_options={"include_usage": True})
    assert [body.count(b"data: ") for body in result.bodies] == [2, 3]


async def test_a_whole_generation_in_one_delta_is_one_send() -> None:
    result = await streamed([delta(0, "all of it", "stop")])
    assert [body.count(b"data: ") for body in result.bodies] == [3]
    assert result.complete


async def test_deltas_without_anything_to_show_are_not_sent() -> None:
    result = await streamed([delta(0, "a")], [delta(0, "")], [delta(0, "b", "stop")])
    assert len(result.bodies) == 2
    assert len(result.events()) == 4


async def test_text_is_spliced_as_json() -> None:
    nasty = 'quote " backslash \\ newline \n tab \t nul \0 data: \n\n é 漢 😀 \u2028'
    result = await streamed([delta(0, nasty)], [delta(0, nasty, "stop")])
    events = result.events()
    assert [event["choices"][0]["delta"]["content"] for event in events[1:3]] == [nasty, nasty]


async def test_model_name_cannot_break_a_chunk() -> None:
    name = 'a"b\\%d\n'
    dataplane = FakeDataPlane(lambda _: [[delta(0, "x", "stop")]], (ServedModel(name, "root", 0, INFO),))
    result = await call(build_app(dataplane, AppSettings()), CHAT, chat_body(model=name))
    assert {event["model"] for event in result.events()[:-1]} == {name}


async def test_error_before_the_first_delta_is_a_status() -> None:
    result = await streamed(QueueFullError("The queue is full.", retry_after=2.2))
    assert result.status == 503
    assert result.headers["retry-after"] == "3"
    assert result.json()["error"]["code"] == "queue_full"


@pytest.mark.parametrize(
    ("error", "code"), [(EngineDeadError("died"), "engine_dead"), (DeadlineExceededError("late"), "deadline_exceeded")]
)
async def test_error_after_the_first_delta_is_an_event(error: Exception, code: str) -> None:
    result = await streamed([delta(0, "a")], error)
    assert result.status == 200
    *_, failure, done = result.events()
    assert failure["error"]["code"] == code
    assert set(failure["error"]) == {"message", "type", "param", "code"}
    assert done == "[DONE]"
    assert result.complete


async def test_unexpected_error_in_a_stream_tells_no_details(caplog: pytest.LogCaptureFixture) -> None:
    result = await streamed([delta(0, "a")], ZeroDivisionError("/secret/path"))
    *_, failure, done = result.events()
    assert failure["error"]["type"] == "server_error"
    assert "secret" not in failure["error"]["message"]
    assert done == "[DONE]"
    assert len(caplog.records) == 1
    assert "ZeroDivisionError" in caplog.text


async def test_running_usage_counts_each_choice_alone() -> None:
    result = await streamed(
        [delta(0, "a", token_ids=[1, 2]), delta(1, "b", token_ids=[3])],
        [delta(0, "", "stop", token_ids=[]), delta(1, "c", "stop", token_ids=[4])],
        n=2,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    events = result.events()[:-1]
    seen = [(event["choices"][0]["index"], event["usage"]["completion_tokens"]) for event in events[:-1]]
    assert seen[:2] == [(0, 0), (1, 0)]
    assert seen[2:] == [(0, 2), (1, 1), (0, 2), (1, 2)]
    assert events[-1]["usage"]["completion_tokens"] == 4


def logprob(token: str, value: float) -> TokenLogprob:
    spelled = list(token.encode())
    return TokenLogprob(token, 7, value, spelled, [Candidate(token, 7, value, spelled), Candidate("z", 8, -3.0, [122])])


async def test_chat_logprobs_in_a_stream() -> None:
    steps: list[Step] = [
        [delta(0, "a", logprobs=[logprob("a", -0.5)])],
        [delta(0, "b", "stop", logprobs=[logprob("b", -math.inf)])],
    ]
    result = await streamed(*steps, logprobs=True, top_logprobs=2)
    _, first, last, _ = result.events()
    assert first["choices"][0]["logprobs"] == {
        "content": [
            {
                "token": "a",
                "logprob": -0.5,
                "bytes": [97],
                "top_logprobs": [
                    {"token": "a", "logprob": -0.5, "bytes": [97]},
                    {"token": "z", "logprob": -3.0, "bytes": [122]},
                ],
            }
        ],
        "refusal": None,
    }
    assert last["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


async def test_token_ids_in_a_stream() -> None:
    result = await streamed(
        [delta(0, "", token_ids=[5])], [delta(0, "a", "stop", token_ids=[6])], return_token_ids=True
    )
    role, first, last, _ = result.events()
    assert role["prompt_token_ids"] == [4, 5]  # "hi" as the fake encodes it
    assert first["choices"][0]["token_ids"] == [5]
    assert last["choices"][0]["token_ids"] == [6]


async def test_deltas_leave_as_they_come() -> None:
    gate = asyncio.Event()

    def script(request: GenerateRequest) -> Iterable[Step]:
        yield [ChoiceDelta(0, "early", [1])]
        yield gate
        yield [ChoiceDelta(0, "late", [2], "stop")]

    dataplane = FakeDataPlane(script)
    running = AsgiCall(build_app(dataplane, AppSettings()), CHAT, chat_body())
    task = asyncio.create_task(running.run())
    await dataplane.generating.wait()
    await dataplane.generations[0].waiting.wait()
    assert b"early" in running.bodies[0]
    assert not running.complete
    gate.set()
    await task
    assert b"late" in running.bodies[-1]


@settings(max_examples=100)
@given(st.lists(st.lists(st.tuples(st.integers(0, 2), st.text(max_size=6)), max_size=4), max_size=6))
def test_however_deltas_are_split_their_concatenation_arrives(batches: list[list[tuple[int, str]]]) -> None:
    steps: list[Step] = [[delta(index, text) for index, text in dict(batch).items()] for batch in batches]
    steps.append([delta(index, "end", "stop") for index in range(3)])
    result = asyncio.run(streamed(*steps, n=3))
    texts = ["", "", ""]
    for event in result.events()[:-1]:
        choice = event["choices"][0]
        texts[choice["index"]] += choice["delta"]["content"]
    expected = ["", "", ""]
    for batch in batches:
        for index, text in dict(batch).items():
            expected[index] += text
    assert texts == [text + "end" for text in expected]


HEARTBEAT = b": keep-alive\n\n"


@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_a_pulse_is_a_comment_and_changes_nothing_else(path: str) -> None:
    steps: list[Step] = [[delta(0, "a")], [delta(0, "b", "stop")]]
    plain = await streamed(*steps, path=path)
    result = await streamed([], [], steps[0], [], steps[1], path=path)
    assert [each == HEARTBEAT for each in result.bodies] == [True, True, False, True, False]
    assert [each["choices"] for each in result.events()[:-1]] == [each["choices"] for each in plain.events()[:-1]]


async def test_an_error_after_a_pulse_is_an_event() -> None:
    result = await streamed([], QueueFullError("full"))
    assert (result.status, result.bodies[0]) == (200, HEARTBEAT)
    assert b"queue_full" in result.bodies[1]
    assert result.bodies[1].endswith(b"data: [DONE]\n\n")
    refused = await streamed(QueueFullError("full"))
    assert refused.status == 503


@pytest.mark.parametrize(("stream", "heartbeat_s", "pulse"), [(True, 3.0, 3.0), (True, 0.0, None), (False, 3.0, None)])
async def test_only_streams_have_a_pulse(stream: bool, heartbeat_s: float, pulse: float | None) -> None:
    dataplane = FakeDataPlane()
    app = build_app(dataplane, AppSettings(heartbeat_s=heartbeat_s))
    await call(app, CHAT, chat_body(stream=stream))
    assert dataplane.requests[0].pulse == pulse
