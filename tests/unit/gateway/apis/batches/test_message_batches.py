"""Anthropic's message batches: their course, their results, and what is wrong with one before it begins."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp

from penstock.engines.errors import EngineDeadError, InvalidRequestError, OverloadedError
from penstock.gateway.apis.batches import lines, message_batches
from penstock.gateway.apis.batches.file_store import FileBounds
from penstock.gateway.apis.batches.service import BatchService
from penstock.gateway.database import Database
from penstock.gateway.requests.access import ApiKeys, key_digest
from penstock.gateway.requests.context import Principal
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.exchange import Exchange
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import FakeDataPlane

EVERY = "/v1/messages/batches"
BOUNDS = FileBounds(bytes=200_000, bytes_of_tenant=200_000, files_of_tenant=50, retention=None)


class Messages:
    """The endpoint that answers lines."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.num_asked = 0
        self.busy_once = True

    async def __call__(self, exchange: Exchange) -> None:
        say = json.loads(await exchange.read(1 << 20)).get("say", "")
        self.num_asked += 1
        if say == "busy" and self.busy_once:
            self.busy_once = False
            raise OverloadedError("There is no room.")
        if say == "wrong":
            raise InvalidRequestError("That is wrong.", param="say")
        if say == "deadly":
            raise EngineDeadError("The engine died.")
        if say == "hint":
            exchange.context.ignore("say", "nobody listens")
        await self.open.wait()
        await exchange.respond(200, json.dumps({"said": say}).encode())


@pytest.fixture
def model() -> Messages:
    return Messages()


@pytest.fixture(params=["disk", "memory"])
async def service(request: pytest.FixtureRequest, tmp_path: Path, model: Messages) -> AsyncIterator[BatchService]:
    on_disk = request.param == "disk"
    database = Database(tmp_path / "penstock.sqlite" if on_disk else None)
    made = BatchService(
        tmp_path if on_disk else None, database, BOUNDS, 4, {"/v1/messages": model}, AppSettings(max_body_bytes=5_000)
    )
    await made.start()
    yield made
    await made.stop()
    database.close()


@pytest.fixture
def app(service: BatchService) -> ASGIApp:
    keys = ApiKeys({key_digest(name.encode()): Principal(tenant=name) for name in ("red", "blue")})
    return build_app(FakeDataPlane(), AppSettings(keys=keys, max_body_bytes=5_000), batches=service)


async def ask(app: ASGIApp, path: str, body: Any = b"", method: str = "GET", key: str = "red") -> AsgiCall:
    return await call(app, path, body, method=method, headers={"x-api-key": key})


async def refused(app: ASGIApp, path: str, body: Any = b"", method: str = "GET") -> str:
    """The message of a refusal."""
    answer = await ask(app, path, body, method)
    assert (answer.status, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    return str(answer.json()["error"]["message"])


def requests(*what: str) -> dict[str, Any]:
    return {"requests": [{"custom_id": f"r{i}", "params": {"say": each}} for i, each in enumerate(what)]}


async def created(app: ASGIApp, *what: str) -> str:
    answer = await ask(app, EVERY, requests(*what), "POST")
    assert answer.status == 200, answer.bodies
    shown = answer.json()
    assert (shown["type"], shown["processing_status"], shown["results_url"]) == ("message_batch", "in_progress", None)
    found: str = shown["id"]
    assert found.startswith("msgbatch_")
    return found


async def ended(app: ASGIApp, batch_id: str) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while (shown := (await ask(app, f"{EVERY}/{batch_id}")).json())["processing_status"] != "ended":
            await asyncio.sleep(0)
    return dict(shown)


async def results(app: ASGIApp, shown: dict[str, Any]) -> dict[str, Any]:
    answer = await ask(app, shown["results_url"])
    assert answer.status == 200
    found = [json.loads(line) for line in b"".join(answer.bodies).splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each["result"] for each in found}


def counts(shown: dict[str, Any]) -> tuple[int, ...]:
    names = ("processing", "succeeded", "errored", "canceled", "expired")
    return tuple(shown["request_counts"][name] for name in names)


async def test_results_have_the_messages_and_the_errors(
    app: ASGIApp, service: BatchService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_AGAIN_AFTER_S", 0.0)
    shown = await ended(app, await created(app, "a", "wrong", "busy", "deadly", "hint"))
    assert counts(shown) == (0, 3, 2, 0, 0)
    assert ("volatile" in shown) == service.volatile
    moments = [datetime.fromisoformat(shown[name]) for name in ("created_at", "ended_at", "expires_at")]
    assert moments == sorted(moments)
    found = await results(app, shown)
    assert found["r0"] == {"type": "succeeded", "message": {"said": "a"}}
    assert found["r2"] == {"type": "succeeded", "message": {"said": "busy"}}
    assert found["r4"]["warnings"] == [{"code": "ignored", "param": "say"}]
    wrong, dead = found["r1"], found["r3"]
    assert (wrong["type"], wrong["error"]["type"]) == ("errored", "error")
    assert wrong["error"]["error"] == {"type": "invalid_request_error", "message": "say: That is wrong."}
    assert (dead["type"], dead["error"]["error"]["type"]) == ("errored", "api_error")


async def test_its_files_are_its_own_and_go_with_it(app: ASGIApp, service: BatchService) -> None:
    shown = await ended(app, await created(app, "a", "wrong"))
    one = f"{EVERY}/{shown['id']}"
    assert (await ask(app, "/v1/files")).json()["data"] == []
    assert (await ask(app, "/v1/batches")).json()["data"] == []
    assert (await ask(app, f"/v1/batches/{shown['id']}")).status == 404
    async with asyncio.timeout(20):  # its input goes when it has ended; its results are there
        while len(service.files.contents.names()) != 2:
            await asyncio.sleep(0)
    assert (await ask(app, one, method="DELETE")).json() == {"id": shown["id"], "type": "message_batch_deleted"}
    assert not service.files.contents.names()
    gone = await ask(app, one)
    assert (gone.status, gone.json()["error"]["type"]) == (404, "not_found_error")


async def test_one_that_is_canceled_says_which_requests_were_not_answered(app: ASGIApp, model: Messages) -> None:
    model.open.clear()
    batch_id = await created(app, *["slow"] * 6)
    one = f"{EVERY}/{batch_id}"
    async with asyncio.timeout(20):
        while not model.num_asked:
            await asyncio.sleep(0)
    assert counts((await ask(app, one)).json()) == (6, 0, 0, 0, 0)
    assert await refused(app, one, method="DELETE") == "message_batch_id: A batch that has not ended cannot be deleted."
    assert (await ask(app, f"{one}/results")).status == 404
    canceled = (await ask(app, f"{one}/cancel", method="POST")).json()
    assert (canceled["processing_status"], canceled["cancel_initiated_at"] is None) == ("canceling", False)
    shown = await ended(app, batch_id)
    assert counts(shown) == (0, 0, 0, 6, 0)
    assert list((await results(app, shown)).values()) == [{"type": "canceled"}] * 6
    assert (
        await refused(app, f"{one}/cancel", method="POST")
        == "message_batch_id: A batch that has ended cannot be canceled."
    )


async def test_one_whose_time_is_over_has_expired(
    app: ASGIApp, model: Messages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_batches, "_WINDOW_S", 0.0)
    model.open.clear()
    shown = await ended(app, await created(app, "a", "b"))
    assert counts(shown) == (0, 0, 0, 0, 2)
    assert (await results(app, shown))["r0"] == {"type": "expired"}


async def test_other_tenants_find_nothing(app: ASGIApp) -> None:
    shown = await ended(app, await created(app, "a"))
    for method, rest in (("GET", ""), ("GET", "/results"), ("POST", "/cancel"), ("DELETE", "")):
        answer = await ask(app, f"{EVERY}/{shown['id']}{rest}", method=method, key="blue")
        assert (answer.status, answer.json()["error"]["type"]) == (404, "not_found_error")
    assert (await ask(app, EVERY, key="blue")).json() == {
        "data": [],
        "has_more": False,
        "first_id": None,
        "last_id": None,
    }


async def test_lists_come_in_pages_the_newest_first(app: ASGIApp) -> None:
    d, c, b, a = reversed([await created(app, "x") for _ in range(4)])

    async def listed(query: str) -> tuple[Sequence[str], bool]:
        found = (await ask(app, f"{EVERY}?{query}")).json()
        ids = [each["id"] for each in found["data"]]
        assert (found["first_id"], found["last_id"]) == (ids[0], ids[-1])
        return ids, found["has_more"]

    assert await listed("") == ([d, c, b, a], False)
    assert await listed("limit=2") == ([d, c], True)
    assert await listed(f"limit=2&after_id={c}") == ([b, a], False)
    assert await listed(f"limit=2&before_id={a}") == ([c, b], True)
    assert await listed(f"limit=9&before_id={b}") == ([d, c], False)
    for query in ("limit=0", "limit=1001", "limit=x"):
        assert await refused(app, f"{EVERY}?{query}") == "limit must be between 1 and 1000."
    for name in ("after_id", "before_id"):
        assert await refused(app, f"{EVERY}?{name}=msgbatch_none") == f"{name} names nothing in this list."


SOME: Any = {"say": "x"}


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "requests"),
        ({"requests": []}, "requests"),
        ({"requests": [{"params": SOME}]}, "custom_id"),
        ({"requests": [{"custom_id": "a"}]}, "params"),
        (
            {"requests": [{"custom_id": "a", "params": SOME}, {"custom_id": "a", "params": SOME}]},
            "requests.1.custom_id",
        ),
        ({"requests": [{"custom_id": "a b", "params": SOME}]}, "requests.0.custom_id"),
        ({"requests": [{"custom_id": "a\n", "params": SOME}]}, "requests.0.custom_id"),
        ({"requests": [{"custom_id": 5, "params": SOME}]}, "requests.0.custom_id"),
        ({"requests": [{"custom_id": "a", "params": "x"}]}, "requests.0.params must be an object"),
        ({"requests": [{"custom_id": "a", "params": {"stream": True}}]}, "cannot be streamed"),
        ({"requests": [{"custom_id": f"r{number}", "params": SOME} for number in range(6)]}, "at most 5"),
    ],
)
async def test_what_is_wrong_with_the_whole_is_said_at_once(
    app: ASGIApp, service: BatchService, monkeypatch: pytest.MonkeyPatch, body: Any, field: str
) -> None:
    monkeypatch.setattr(message_batches, "MAX_LINES", 5)
    answer = await ask(app, EVERY, body, "POST")
    assert (answer.status, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert field in answer.json()["error"]["message"]
    assert not service.files.contents.names()


async def test_its_bytes_are_bounded(app: ASGIApp, service: BatchService) -> None:
    large = {"requests": [{"custom_id": "a", "params": {"say": "x" * 5_000}}]}
    answer = await ask(app, EVERY, large, "POST")
    assert (answer.status, answer.json()["error"]["type"]) == (413, "request_too_large")
    deep = b'{"requests": [{"custom_id": "a", "params": {"say": ' + b"[" * 200 + b"]" * 200 + b"}}]}"
    assert await refused(app, EVERY, deep, "POST") == "requests.0.params nests deeper than 100 levels."
    if service.volatile:
        many = requests(*["x" * 4_000] * 60)
        assert (await ask(app, EVERY, many, "POST")).status == 413
    assert not service.files.contents.names()


async def test_params_may_have_lines_of_their_own(app: ASGIApp) -> None:
    body = b'{"requests": [{"custom_id": "a", "params": {\r\n  "say":\n "x"\n}}]}'
    answer = await ask(app, EVERY, body, "POST")
    shown = await ended(app, answer.json()["id"])
    assert await results(app, shown) == {"a": {"type": "succeeded", "message": {"said": "x"}}}


async def test_one_that_the_server_cannot_go_on_with_has_errors(
    app: ASGIApp, service: BatchService, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_room(*given: object) -> bool:
        return False

    monkeypatch.setattr(service.batches, "reserve", no_room)
    shown = await ended(app, await created(app, "a", "b"))
    assert counts(shown) == (0, 0, 2, 0, 0)
    [first, second] = (await results(app, shown)).values()
    assert first == second
    assert "no room in memory" in first["error"]["error"]["message"]


async def test_results_that_are_no_longer_kept(app: ASGIApp, service: BatchService) -> None:
    shown = await ended(app, await created(app, "a"))
    await service.files.forget(list(service.files.contents.names()))
    answer = await ask(app, shown["results_url"])
    assert (answer.status, answer.json()["error"]["type"]) == (404, "not_found_error")


async def test_a_server_that_keeps_no_files_says_so() -> None:
    answer = await call(build_app(FakeDataPlane(), AppSettings()), EVERY, requests("a"))
    assert answer.status == 400
    assert "--data-memory" in answer.json()["error"]["message"]
