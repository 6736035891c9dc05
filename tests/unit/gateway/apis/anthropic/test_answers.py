"""Whole calls over scripted generations: answers, streams, and errors wherever they arise."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from penstock.engines.errors import (
    DeadlineExceededError,
    EngineDeadError,
    EngineError,
    NotReadyError,
    PenstockError,
    QueueFullError,
)
from penstock.gateway.models.language.dataplane import GenerateRequest
from penstock.gateway.requests.access import ApiKeys, key_digest
from penstock.gateway.requests.context import Principal, Role
from penstock.gateway.requests.quota import Limits, Quota
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import FakeDataPlane, Step, delta
from support.keys import api_keys
from support.messages import accumulated, events_of

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


async def ask(dataplane: FakeDataPlane | None = None, path: str = PATH, **fields: Any) -> AsgiCall:
    return await call(build_app(dataplane or FakeDataPlane(), AppSettings()), path, BODY | fields)


async def test_a_whole_answer() -> None:
    answer = await ask(stop_sequences=["."])
    said = answer.json()
    assert said.pop("id").startswith("msg_")
    assert said == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "one two three"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
            "output_tokens": 3,
        },
    }
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


async def test_a_stream() -> None:
    answer = await ask(stream=True)
    events = events_of(b"".join(answer.bodies))
    assert accumulated(events) == [{"type": "text", "text": "one two three"}]
    assert events[-2]["usage"]["output_tokens"] == 3
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert len(answer.bodies) == 3, "what a step brings leaves together, and the end with it"


async def test_why_it_stopped() -> None:
    def script(request: GenerateRequest) -> Iterable[Step]:
        yield [delta(0, "a", "stop", stop_reason="###")]

    for stream in (True, False):
        answer = await ask(FakeDataPlane(script), stream=stream)
        said = events_of(b"".join(answer.bodies))[-2]["delta"] if stream else answer.json()
        assert (said["stop_reason"], said["stop_sequence"]) == ("stop_sequence", "###")


async def test_a_silent_stream_begins_with_comments_and_goes_on_with_pings() -> None:
    def script(request: GenerateRequest) -> Iterable[Step]:
        assert request.pulse == 15
        yield []
        yield [delta(0, "a")]
        yield []
        yield [delta(0, "b", "stop")]

    bodies = (await ask(FakeDataPlane(script), stream=True)).bodies
    assert bodies[0] == b": keep-alive\n\n"
    assert events_of(bodies[1])[0]["type"] == "message_start"
    assert events_of(bodies[2]) == [{"type": "ping"}]


async def test_the_count_of_tokens_is_that_of_the_prompt() -> None:
    dataplane = FakeDataPlane()
    answer = await ask(dataplane, COUNT, system="abc")
    assert answer.json() == {"input_tokens": 5}
    assert dataplane.requests == []
    count_only = {key: value for key, value in BODY.items() if key != "max_tokens"}
    assert (await call(build_app(FakeDataPlane(), AppSettings()), COUNT, count_only)).json() == {"input_tokens": 2}


async def test_the_assistant_s_turn_is_opened_or_continued() -> None:
    dataplane = FakeDataPlane()
    await ask(dataplane)
    await ask(dataplane, messages=[*BODY["messages"], {"role": "assistant", "content": "The"}])
    assert [(options["opens"], options["continues"]) for _, options in dataplane.prompts] == [
        (True, False),
        (False, True),
    ]


async def test_a_fair_server_without_keys_tells_users_apart() -> None:
    dataplane = FakeDataPlane()
    for policy in ("fair", "fcfs"):
        app = build_app(dataplane, AppSettings(policy=policy))
        await call(app, PATH, BODY | {"metadata": {"user_id": "x" * 200}})
    assert [asked.tenant for asked in dataplane.requests] == ["x" * 128, ""]


def said(answer: AsgiCall, status: int, kind: str) -> str:
    error = answer.json()
    assert (answer.status, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert error["request_id"] == answer.headers["request-id"]
    return str(error["error"]["message"])


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (QueueFullError("full"), 529, "overloaded_error"),
        (NotReadyError("loading"), 503, "overloaded_error"),
        (EngineDeadError("gone"), 503, "api_error"),
        (EngineError("broken"), 500, "api_error"),
        (DeadlineExceededError("late"), 504, "timeout_error"),
        (ValueError("inner"), 500, "api_error"),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_errors_before_the_first_byte(error: Exception, status: int, kind: str, stream: bool) -> None:
    dataplane = FakeDataPlane()
    dataplane.admit = error
    answer = await ask(dataplane, stream=stream)
    message = said(answer, status, kind)
    assert (message == str(error)) == isinstance(error, PenstockError)
    assert ("retry-after" in answer.headers) == (kind == "overloaded_error")


async def test_an_error_in_a_stream_is_its_last_event() -> None:
    def script(request: GenerateRequest) -> Iterable[Step]:
        yield [delta(0, "a")]
        yield EngineError("broken")

    answer = await ask(FakeDataPlane(script), stream=True)
    *_, before, last = events_of(b"".join(answer.bodies))
    assert before["type"] == "content_block_delta"
    request_id = answer.headers["request-id"]
    assert last == {
        "type": "error",
        "error": {"type": "api_error", "message": "broken"},
        "request_id": request_id,
    }
    assert answer.complete


@pytest.mark.parametrize("path", [PATH, COUNT, "/v1/messages/batches", "/v1/messages/"])
async def test_nobody_is_told_anything_without_a_key(path: str) -> None:
    app = build_app(FakeDataPlane(), AppSettings(keys=api_keys({"team": "sesame"})))
    answer = await call(app, path, BODY, headers={"x-api-key": "wrong"})
    assert "x-api-key" in said(answer, 401, "authentication_error")


@pytest.mark.parametrize("path", [PATH, COUNT])
async def test_a_key_without_the_role(path: str) -> None:
    keys = api_keys({"team": "sesame"}, frozenset({Role.METADATA}))
    app = build_app(FakeDataPlane(), AppSettings(keys=keys))
    said(await call(app, path, BODY, headers={"x-api-key": "sesame"}), 403, "permission_error")


async def test_a_key_that_has_used_up_what_it_may() -> None:
    quota = Quota(Limits(requests_per_minute=1))
    app = build_app(FakeDataPlane(), AppSettings(keys=ApiKeys({key_digest(b"sesame"): Principal(quota=quota)})))
    answers = [await call(app, PATH, BODY, headers={"x-api-key": "sesame"}) for _ in range(2)]
    assert answers[0].status == 200
    assert "requests per minute" in said(answers[1], 429, "rate_limit_error")
    assert int(answers[1].headers["retry-after"]) > 0


async def test_a_body_that_is_too_large() -> None:
    app = build_app(FakeDataPlane(), AppSettings(max_body_bytes=10))
    said(await call(app, PATH, BODY), 413, "request_too_large")


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/v1/messages/nothing", 404, "not_found_error"),
        ("GET", "/v1/messages/count_tokens/more", 404, "not_found_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
    ],
)
async def test_paths_that_there_are_not(method: str, path: str, status: int, kind: str) -> None:
    said(await call(build_app(FakeDataPlane(), AppSettings()), path, method=method), status, kind)


async def test_other_paths_keep_their_form() -> None:
    answer = await call(build_app(FakeDataPlane(), AppSettings()), "/v1/messagesque")
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert "request-id" not in answer.headers


async def test_a_body_that_is_not_json() -> None:
    app = build_app(FakeDataPlane(), AppSettings())
    said(await call(app, PATH, BODY, headers={"content-type": "text/plain"}), 415, "invalid_request_error")


async def test_a_client_that_leaves_frees_its_request() -> None:
    dataplane = FakeDataPlane(lambda _: [[delta(0, "a")], asyncio.Event()])
    asked = AsgiCall(build_app(dataplane, AppSettings()), PATH, BODY | {"stream": True})
    running = asyncio.ensure_future(asked.run())
    await dataplane.generating.wait()
    await asked.sent.wait()
    asked.disconnect()
    await running
    assert dataplane.generations[0].closed.is_set()
