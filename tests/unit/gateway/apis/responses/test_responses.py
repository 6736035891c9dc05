"""Whole calls over scripted generations: responses, streams, what is kept, and errors wherever they arise."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from penstock.engines.errors import DeadlineExceededError, EngineDeadError, EngineError, NotReadyError, QueueFullError
from penstock.gateway.models.language.dataplane import GenerateRequest
from penstock.gateway.requests.access import ApiKeys, key_digest
from penstock.gateway.requests.call import RequestJournal
from penstock.gateway.requests.context import Principal, Role
from penstock.gateway.requests.quota import Limits, Quota
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import FakeDataPlane, Step, delta
from support.keys import api_keys
from support.messages import events_of
from support.responses import accumulated, validated, validated_item, validated_response

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "tiny", "input": "hi"}


async def ask(dataplane: FakeDataPlane | None = None, **fields: Any) -> AsgiCall:
    return await call(build_app(dataplane or FakeDataPlane(), AppSettings()), PATH, BODY | fields)


async def test_a_whole_response() -> None:
    said = validated_response((await ask(metadata={"a": "b"}, instructions="Be kind.")).json())
    [item] = said.pop("output")
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "one two three", "annotations": [], "logprobs": []}],
    }
    assert said.pop("id").startswith("resp_")
    assert said.pop("created_at") <= said.pop("completed_at")
    assert said == {
        "object": "response", "status": "completed", "model": "tiny", "instructions": "Be kind.", "store": True,
        "background": False, "error": None, "incomplete_details": None, "max_output_tokens": None,
        "max_tool_calls": None, "metadata": {"a": "b"}, "parallel_tool_calls": True, "previous_response_id": None,
        "prompt_cache_key": None, "prompt_cache_retention": None,
        "reasoning": {"effort": None, "summary": None}, "safety_identifier": None,
        "conversation": None, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "service_tier": "default", "temperature": 1.0, "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto", "tools": [], "top_logprobs": 0, "top_p": 1.0, "truncation": "disabled", "user": None,
        "usage": {
            "input_tokens": 10,
            "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 13,
        },
    }  # fmt: skip


async def test_a_stream() -> None:
    answer = await ask(stream=True)
    [item] = accumulated(events_of(b"".join(answer.bodies)))
    assert item["content"][0]["text"] == "one two three"
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert len(answer.bodies) == 3, "what a step brings leaves together, and the end with it"


async def test_a_silent_stream_begins_with_comments_and_goes_on_with_them() -> None:
    def script(request: GenerateRequest) -> Iterable[Step]:
        assert request.pulse == 15
        yield []
        yield [delta(0, "a")]
        yield []
        yield [delta(0, "b", "stop")]

    bodies = (await ask(FakeDataPlane(script), stream=True)).bodies
    assert (bodies[0], bodies[2]) == (b": keep-alive\n\n", b": keep-alive\n\n")
    assert events_of(bodies[1])[0]["type"] == "response.created"


async def test_instructions_are_not_carried_over_and_the_conversation_is() -> None:
    dataplane = FakeDataPlane()
    app = build_app(dataplane, AppSettings())
    first = (await call(app, PATH, BODY | {"instructions": "Be kind."})).json()
    second = (await call(app, PATH, BODY | {"input": "And?", "previous_response_id": first["id"]})).json()
    assert second["previous_response_id"] == first["id"]
    assert dataplane.prompts[1][0] == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "one two three"},
        {"role": "user", "content": "And?"},
    ]
    assert dataplane.prompts[1][1]["opens"]


async def test_pages_of_input_items() -> None:
    app = build_app(FakeDataPlane(), AppSettings())
    items = [{"role": "user", "content": f"m{number}", "id": f"m{number}"} for number in range(3)]
    response_id = (await call(app, PATH, BODY | {"input": items})).json()["id"]

    async def page(query: str) -> tuple[list[str], bool]:
        said = (await call(app, f"{PATH}/{response_id}/input_items{query}", method="GET")).json()
        ids = [validated_item(item)["id"] for item in said["data"]]
        assert (said["object"], said["first_id"], said["last_id"]) == (
            "list",
            *([ids[0], ids[-1]] if ids else ["", ""]),
        )
        return ids, said["has_more"]

    assert await page("") == (["m2", "m1", "m0"], False)
    assert await page("?order=asc&limit=2") == (["m0", "m1"], True)
    assert await page("?order=asc&limit=2&after=m1") == (["m2"], False)
    assert await page("?after=m0") == ([], False)


@pytest.mark.parametrize(
    ("method", "rest", "param"),
    [
        ("GET", "?stream=true", "stream"),
        ("GET", "/input_items?limit=0", "limit"),
        ("GET", "/input_items?limit=101", "limit"),
        ("GET", "/input_items?limit=%C2%B2", "limit"),
        ("GET", "/input_items?order=up", "order"),
        ("GET", "/input_items?after=x", "after"),
        ("POST", "/cancel", "response_id"),
    ],
)
async def test_what_is_refused_of_a_response_that_is_there(method: str, rest: str, param: str) -> None:
    app = build_app(FakeDataPlane(), AppSettings())
    response_id = (await call(app, PATH, BODY)).json()["id"]
    answer = await call(app, f"{PATH}/{response_id}{rest}", method=method)
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)
    assert (await call(app, f"{PATH}/{response_id}", method="GET")).status == 200


async def test_the_bounds_of_what_is_kept_are_the_server_s() -> None:
    app = build_app(FakeDataPlane(), AppSettings(stored_responses=1))
    ids = [(await call(app, PATH, BODY)).json()["id"] for _ in range(2)]
    assert [(await call(app, f"{PATH}/{each}", method="GET")).status for each in ids] == [404, 200]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_response_that_is_too_large_says_that_it_is_not_kept(stream: bool) -> None:
    app = build_app(FakeDataPlane(), AppSettings(stored_responses_memory=100))
    answer = await call(app, PATH, BODY | {"store": True, "stream": stream})
    ended = events_of(b"".join(answer.bodies))[-1]["response"] if stream else answer.json()
    assert (ended["status"], ended["store"]) == ("completed", False)
    assert (await call(app, f"{PATH}/{ended['id']}", method="GET")).status == 404


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (QueueFullError("full"), 503), (NotReadyError("starting"), 503), (DeadlineExceededError("late"), 504),
        (EngineDeadError("dead"), 503), (ValueError("bug"), 500),
    ],
)  # fmt: skip
async def test_errors_before_the_first_byte(error: Exception, status: int, stream: bool) -> None:
    dataplane = FakeDataPlane()
    dataplane.admit = error
    answer = await ask(dataplane, stream=stream)
    assert answer.status == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_an_error_in_a_stream_is_a_response_that_failed() -> None:
    def script(request: GenerateRequest) -> Iterable[Step]:
        yield [delta(0, "a")]
        yield EngineError("broken")

    dataplane = FakeDataPlane(script)
    app = build_app(dataplane, AppSettings())
    answer = await call(app, PATH, BODY | {"stream": True})
    events = events_of(b"".join(answer.bodies))
    assert [item["status"] for item in accumulated(events)] == ["incomplete"]
    failed = events[-1]["response"]
    assert failed["error"] == {"code": "server_error", "message": "broken"}
    assert answer.complete
    assert (await call(app, f"{PATH}/{failed['id']}", method="GET")).json() == failed


async def test_an_error_before_a_response_has_begun() -> None:
    def script(request: GenerateRequest) -> Iterable[Step]:
        yield []
        yield EngineError("broken")

    bodies = (await ask(FakeDataPlane(script), stream=True)).bodies
    [event] = events_of(b"".join(bodies[1:]))
    assert (validated(event)["type"], event["message"]) == ("error", "broken")


@pytest.mark.parametrize("path", [PATH, f"{PATH}/x/cancel"])
async def test_keys_without_the_role_and_without_requests_left(path: str) -> None:
    keys = api_keys({"team": "sesame"}, frozenset({Role.METADATA}))
    headers = {"authorization": "Bearer sesame"}
    app = build_app(FakeDataPlane(), AppSettings(keys=keys))
    assert (await call(app, path, BODY, headers=headers)).status == 403
    quota = Quota(Limits(requests_per_minute=1))
    app = build_app(FakeDataPlane(), AppSettings(keys=ApiKeys({key_digest(b"sesame"): Principal(quota=quota)})))
    statuses = [(await call(app, PATH, BODY, headers=headers)).status for _ in range(2)]
    assert statuses == [200, 429]


async def test_records_name_the_route() -> None:
    """In metrics and in the access log, never the response's id."""
    ended: list[str] = []
    app = build_app(
        FakeDataPlane(), AppSettings(journal=RequestJournal([lambda context: ended.append(context.record.route)]))
    )
    response_id = (await call(app, PATH, BODY)).json()["id"]
    await call(app, f"{PATH}/{response_id}", method="GET")
    assert ended == ["/v1/responses", "/v1/responses/{response_id}"]


async def test_a_client_that_leaves_frees_its_request_and_nothing_is_kept() -> None:
    dataplane = FakeDataPlane(lambda _: [[delta(0, "a")], asyncio.Event()])
    app = build_app(dataplane, AppSettings())
    asked = AsgiCall(app, PATH, BODY | {"stream": True})
    running = asyncio.ensure_future(asked.run())
    await dataplane.generating.wait()
    while len(asked.messages) < 2:
        asked.sent.clear()
        await asked.sent.wait()
    response_id = events_of(asked.bodies[0])[0]["response"]["id"]
    asked.disconnect()
    await running
    assert dataplane.generations[0].closed.is_set()
    assert (await call(app, f"{PATH}/{response_id}", method="GET")).status == 404
