"""Responses in the background: how they end, who sees them, how many there may be, and readers that come again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import pytest

from penstock.engines.errors import ContextLengthError, EngineError, PenstockError
from penstock.gateway.apis.responses import background
from penstock.gateway.apis.responses.items import encode_reasoning
from penstock.gateway.apis.responses.service import ResponseService
from penstock.gateway.database import Database
from penstock.gateway.models.language.dataplane import ChoiceDelta, GenerateRequest
from penstock.gateway.requests.access import ApiKeys, key_digest
from penstock.gateway.requests.call import RequestJournal
from penstock.gateway.requests.context import Principal
from penstock.gateway.requests.quota import Limits, Quota
from penstock.gateway.requests.record import Outcome
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from penstock.tokenizers import ReasoningPart
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import FakeDataPlane, Step, delta
from support.keys import api_keys
from support.messages import events_of
from support.responses import accumulated, validated_response

PATH = "/v1/responses"
BODY: dict[str, Any] = {"model": "tiny", "input": "hi", "background": True}
ENDED = ("completed", "failed", "cancelled", "incomplete")


class Rig:
    """A server whose model says `first`, and "two" when `go_on` is set."""

    def __init__(self, **settings: Any) -> None:
        self.go_on = asyncio.Event()
        self.error: Exception | None = None
        self.first = delta(0, "one")
        self.plane = FakeDataPlane(self._script)
        self.settings = AppSettings(**settings)
        self.database = Database(None)
        self.service = ResponseService(self.database, self.settings)
        self.app = build_app(self.plane, self.settings, responses=self.service)

    def _script(self, request: GenerateRequest) -> Iterable[Step]:
        yield [self.first]
        yield self.go_on
        if self.error is not None:
            yield self.error
        yield [delta(0, " two", "stop")]

    async def begin(self, key: str = "", **fields: Any) -> str:
        answer = await self.ask("", BODY | fields, key=key)
        assert answer.status == 200, answer.json()
        shown = validated_response(answer.json())
        assert (shown["status"], shown["background"], shown["output"]) == ("queued", True, [])
        return str(shown["id"])

    async def ask(self, rest: str, body: Any = b"", *, key: str = "", **options: Any) -> AsgiCall:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return await call(self.app, f"{PATH}{rest}", body, headers=headers, **options)

    async def get(self, response_id: str, key: str = "") -> dict[str, Any]:
        answer = await self.ask(f"/{response_id}", method="GET", key=key)
        assert answer.status == 200, answer.json()
        return validated_response(answer.json())

    async def cancel(self, response_id: str) -> AsgiCall:
        return await self.ask(f"/{response_id}/cancel")

    async def until(self, response_id: str, *statuses: str) -> dict[str, Any]:
        async with asyncio.timeout(20):
            while (shown := await self.get(response_id))["status"] not in statuses:
                await asyncio.sleep(0)
        return shown

    async def stream(self, response_id: str, query: str = "") -> list[dict[str, Any]]:
        answer = await self.ask(f"/{response_id}?stream=true{query}", method="GET")
        assert answer.status == 200, answer.json()
        return events_of(b"".join(answer.bodies))


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def made(**settings: Any) -> Rig:
        rigs.append(Rig(**settings))
        return rigs[-1]

    yield made
    for rig in rigs:
        rig.settings.drain.expire()
        await rig.service.stop()
        rig.database.close()


@pytest.fixture
def rig(make: Callable[..., Rig]) -> Rig:
    return make()


async def test_reasoning_is_encoded_for_those_who_ask(rig: Rig) -> None:
    rig.first = ChoiceDelta(0, "", [1], parts=[ReasoningPart("Hm.")])
    rig.go_on.set()
    for include, encoded in (([], None), (["reasoning.encrypted_content"], encode_reasoning("Hm."))):
        ended = await rig.until(await rig.begin(include=include), *ENDED)
        assert [item.get("encrypted_content") for item in ended["output"]] == [encoded, None]


async def test_a_response_is_queued_in_progress_and_completed(rig: Rig) -> None:
    response_id = await rig.begin()
    assert (await rig.until(response_id, "in_progress"))["output"] == []
    rig.go_on.set()
    ended = await rig.until(response_id, *ENDED)
    assert ended["status"] == "completed"
    assert ended["output"][0]["content"][0]["text"] == "one two"
    assert ended["usage"]["output_tokens"] == 2
    assert rig.plane.generations[0].closed.is_set()
    following = await rig.ask("", BODY | {"background": False, "input": "And?", "previous_response_id": response_id})
    assert following.status == 200
    assert [message["content"] for message in rig.plane.prompts[1][0]] == ["hi", "one two", "And?"]


async def test_nothing_goes_on_from_one_that_has_not_ended(rig: Rig) -> None:
    response_id = await rig.begin()
    answer = await rig.ask("", BODY | {"previous_response_id": response_id})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "previous_response_id")
    assert "still being made" in answer.json()["error"]["message"]


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_cancelled_response_ends_its_generation_and_stays_cancelled(
    rig: Rig, begun: bool, stream: bool
) -> None:
    if stream:
        asked = asyncio.ensure_future(rig.ask("", BODY | {"stream": True}))
        await rig.plane.generating.wait()
        [response_id] = rig.service.background._open
    else:
        response_id = await rig.begin()
    if begun:
        await rig.until(response_id, "in_progress")
    answer = await rig.cancel(response_id)
    assert (answer.status, answer.json()["status"]) == (200, "cancelled")
    assert all(generation.closed.is_set() for generation in rig.plane.generations)
    again = await rig.cancel(response_id)
    assert (again.status, again.json()) == (200, answer.json())
    assert await rig.get(response_id) == answer.json()
    if stream:
        events = events_of(b"".join((await asked).bodies))
        assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.failed", "cancelled")
        if begun:
            assert [item["status"] for item in accumulated(events)] == ["incomplete"]


@pytest.mark.parametrize(
    ("error", "message"), [(EngineError("broken"), "broken"), (ValueError("secret"), "The server had an error")]
)
async def test_one_that_fails_says_why(
    rig: Rig, error: Exception, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    rig.error = error
    rig.go_on.set()
    ended = await rig.until(await rig.begin(), *ENDED)
    assert ended["status"] == "failed"
    assert ended["error"]["message"].startswith(message)
    assert ended["output"][0]["status"] == "incomplete"
    assert ("secret" in caplog.text) == (not isinstance(error, PenstockError))


@pytest.mark.parametrize(
    ("error", "code"), [(EngineError("no"), "server_error"), (ContextLengthError("no"), "invalid_prompt")]
)
async def test_what_the_engine_refuses_has_failed(rig: Rig, error: Exception, code: str) -> None:
    rig.plane.admit = error
    ended = await rig.until(await rig.begin(), *ENDED)
    assert (ended["status"], ended["error"], ended["output"]) == ("failed", {"code": code, "message": "no"}, [])


async def test_when_the_drain_is_over_what_runs_has_failed_and_says_why(rig: Rig) -> None:
    response_id = await rig.begin(stream=False)
    await rig.until(response_id, "in_progress")
    rig.settings.drain.begin()
    assert rig.settings.drain.in_flight == 1
    rig.settings.drain.expire()
    await rig.service.stop()
    failed = await rig.get(response_id)
    assert (failed["status"], failed["error"]["message"]) == ("failed", "The server is shutting down.")


async def test_so_many_at_a_time_for_a_tenant_and_for_all(make: Callable[..., Rig]) -> None:
    keys = api_keys({"red": "r", "blue": "b", "green": "g"})
    rig = make(keys=keys, background_responses=3, background_responses_per_tenant=2)
    mine = [await rig.begin("r") for _ in range(2)]
    assert (await rig.ask("", BODY, key="r")).status == 503
    await rig.begin("b")
    answer = await rig.ask("", BODY, key="g")
    assert (answer.status, answer.headers["retry-after"]) == (503, "10")
    assert (await rig.ask(f"/{mine[0]}/cancel", key="r")).status == 200
    await rig.begin("g")


async def test_those_under_way_do_not_push_out_what_others_have_kept(make: Callable[..., Rig]) -> None:
    keys = api_keys({"red": "r", "blue": "b"})
    rig = make(keys=keys, stored_responses_memory=30_000, stored_responses_memory_per_tenant=20_000)
    rig.go_on.set()
    kept = (await rig.ask("", BODY | {"background": False}, key="b")).json()["id"]
    rig.go_on.clear()
    statuses = [(await rig.ask("", BODY | {"input": "x" * 5000}, key="r")).status for _ in range(4)]
    assert statuses == [200, 200, 503, 503]
    assert (await rig.ask(f"/{kept}", method="GET", key="b")).status == 200


async def test_a_server_without_them(make: Callable[..., Rig]) -> None:
    answer = await make(background_responses=0).ask("", BODY)
    assert (answer.status, answer.json()["error"]["param"]) == (400, "background")


async def test_nobody_else_sees_one(make: Callable[..., Rig]) -> None:
    rig = make(keys=api_keys({"red": "r", "blue": "b"}))
    asked = asyncio.ensure_future(rig.ask("", BODY | {"stream": True}, key="r"))
    await rig.plane.generating.wait()
    [response_id] = rig.service.background._open

    async def statuses(key: str) -> list[int]:
        uses = (("GET", ""), ("GET", "?stream=true"), ("POST", "/cancel"), ("DELETE", ""))
        return [(await rig.ask(f"/{response_id}{rest}", method=method, key=key)).status for method, rest in uses]

    assert await statuses("b") == [404] * 4
    assert (await rig.get(response_id, "r"))["status"] in ("queued", "in_progress")
    rig.go_on.set()
    await asked
    assert await statuses("b") == [404] * 4
    assert await statuses("r") == [200] * 4


async def test_a_stream_goes_on_after_its_reader_has_left(rig: Rig) -> None:
    asked = AsgiCall(rig.app, PATH, BODY | {"stream": True})
    running = asyncio.ensure_future(asked.run())
    await rig.plane.generating.wait()
    while b"one" not in b"".join(asked.bodies):
        asked.sent.clear()
        await asked.sent.wait()
    asked.disconnect()
    await running
    seen = events_of(b"".join(asked.bodies))
    response_id, last = seen[0]["response"]["id"], seen[-1]["sequence_number"]
    assert not asked.complete
    assert (await rig.get(response_id))["status"] == "in_progress"
    reading = asyncio.ensure_future(rig.stream(response_id, f"&starting_after={last}"))
    await asyncio.sleep(0)
    rig.go_on.set()
    rest = await reading
    [item] = accumulated(seen + rest)
    assert item["content"][0]["text"] == "one two"
    assert await rig.get(response_id) == rest[-1]["response"]
    assert await rig.stream(response_id) == seen + rest, "also when it has ended"
    kinds = [event["type"].removeprefix("response.") for event in seen[:3]]
    assert kinds == ["created", "queued", "in_progress"]
    assert seen[0]["response"]["status"] == "queued"


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("?stream=true&starting_after=x", "starting_after"),
        ("?stream=true&starting_after=-1", "starting_after"),
        ("?stream=true&starting_after=99", "starting_after"),
        ("?stream=true&starting_after=%C2%B2", "starting_after"),
        ("?starting_after=1", "starting_after"),
        ("?stream=yes", "stream"),
        ("?include_obfuscation=true", "include_obfuscation"),
    ],
)
async def test_bad_questions_for_events(rig: Rig, query: str, param: str) -> None:
    rig.go_on.set()
    asked = await rig.ask("", BODY | {"stream": True})
    response_id = events_of(b"".join(asked.bodies))[0]["response"]["id"]
    answer = await rig.ask(f"/{response_id}{query}", method="GET")
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)


async def test_without_stream_there_are_no_events(rig: Rig) -> None:
    answer = await rig.ask(f"/{await rig.begin()}?stream=true", method="GET")
    assert (answer.status, answer.json()["error"]["param"]) == (400, "stream")


async def test_events_of_those_that_ended_are_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.go_on.set()
    ids = []
    for _ in range(2):
        asked = await rig.ask("", BODY | {"stream": True})
        ids.append(events_of(b"".join(asked.bodies))[0]["response"]["id"])
        monkeypatch.setattr(background, "_ENDED_LOGS_BYTES", len(b"".join(asked.bodies)) + 100)
    statuses = [(await rig.ask(f"/{each}?stream=true", method="GET")).status for each in ids]
    assert statuses == [400, 200]


async def test_one_that_is_too_large_to_be_kept_has_failed(make: Callable[..., Rig]) -> None:
    rig = make(stored_responses_memory=4000)
    rig.plane.script = lambda _: [[delta(0, "x" * 4000, "stop")]]
    ended = await rig.until(await rig.begin(), *ENDED)
    assert (ended["status"], ended["output"]) == ("failed", [])
    assert "too large" in ended["error"]["message"]
    answer = await rig.ask("", BODY | {"input": "x" * 4000})
    assert (answer.status, answer.json()["error"]["param"]) == (400, "input")


async def test_one_under_way_can_be_deleted(rig: Rig) -> None:
    response_id = await rig.begin()
    await rig.until(response_id, "in_progress")
    assert (await rig.ask(f"/{response_id}", method="DELETE")).status == 200
    assert rig.plane.generations[0].closed.is_set()
    assert (await rig.ask(f"/{response_id}", method="GET")).status == 404


async def test_it_counts_against_its_key_until_it_ends(make: Callable[..., Rig]) -> None:
    quota = Quota(Limits(concurrent_requests=3, requests_per_minute=100))
    rig = make(keys=ApiKeys({key_digest(b"k"): Principal(quota=quota)}))
    response_id = await rig.begin("k", input="x" * 100_000)
    bodies = rig.settings.intake.bodies
    assert (quota.in_flight, bodies.held > 0) == (1, True)
    await rig.ask(f"/{response_id}/cancel", key="k")
    assert (quota.in_flight, bodies.held) == (0, 0)


async def test_a_cancelled_one_is_recorded_once_and_no_longer_in_flight(make: Callable[..., Rig]) -> None:
    ended: list[tuple[str, Outcome]] = []
    journal = RequestJournal([lambda context: ended.append((context.record.route, context.record.outcome))])
    rig = make(journal=journal)
    response_id = await rig.begin()
    await rig.until(response_id, "in_progress")
    await rig.cancel(response_id)
    route = "/v1/responses/background"
    assert [outcome for name, outcome in ended if name == route] == [Outcome.CANCELLED]
    assert rig.settings.journal.in_flight() == ()


async def test_a_conversation_goes_on_in_the_background(rig: Rig) -> None:
    rig.go_on.set()
    made = (await call(rig.app, "/v1/conversations", b"{}")).json()["id"]
    await rig.until(await rig.begin(conversation=made), "completed")
    items = (await call(rig.app, f"/v1/conversations/{made}/items?order=asc", method="GET")).json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["hi", "one two"]
