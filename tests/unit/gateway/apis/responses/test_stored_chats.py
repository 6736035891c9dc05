"""Chats with `store`: what is kept of them, whose they are, how they are listed, and what is refused."""

from __future__ import annotations

import time
from typing import Any

import pytest
from openai.types.chat import ChatCompletion
from starlette.types import ASGIApp

from penstock.gateway.apis.responses.service import ResponseService
from penstock.gateway.database import Database
from penstock.gateway.models.pooling.plane import PoolingPlane
from penstock.gateway.requests.access import INFER
from penstock.gateway.server.ports.http_apps import App, batch_endpoints, build_app
from penstock.gateway.transports.http.routes import Route
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import FakeDataPlane, delta
from support.keys import api_keys

PATH = "/v1/chat/completions"
HI = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": "tiny", "messages": [HI], "store": True}


class Rig:
    def __init__(self, dataplane: FakeDataPlane | None = None, **settings: Any) -> None:
        self.service = ResponseService(Database(None), AppSettings(**settings))
        plane = dataplane or FakeDataPlane()
        self.app: ASGIApp = build_app(plane, AppSettings(**settings), responses=self.service)

    async def ask(self, rest: str = "", body: Any = b"", method: str = "GET", **options: Any) -> AsgiCall:
        return await call(self.app, f"{PATH}{rest}", body, method=method, **options)

    async def chat(self, **fields: Any) -> dict[str, Any]:
        answer = await self.ask("", BODY | fields, "POST")
        assert answer.status == 200, answer.json()
        return dict(answer.json())

    async def ids(self, query: str = "", **options: Any) -> list[str]:
        answer = await self.ask(query, **options)
        assert answer.status == 200, answer.json()
        return [each["id"] for each in answer.json()["data"]]


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_a_chat_from_its_beginning_to_its_end(rig: Rig) -> None:
    made = await rig.chat(metadata={"a": "b"})
    kept = (await rig.ask(f"/{made['id']}")).json()
    assert kept == made
    ChatCompletion.model_validate(kept)
    changed = (await rig.ask(f"/{made['id']}", {"metadata": {"c": "d"}}, "POST")).json()
    assert changed == made | {"metadata": {"c": "d"}}
    assert (await rig.ask()).json()["data"] == [changed]
    gone = await rig.ask(f"/{made['id']}", method="DELETE")
    assert gone.json() == {"object": "chat.completion.deleted", "id": made["id"], "deleted": True}
    for method, rest in (("GET", ""), ("GET", "/messages"), ("DELETE", "")):
        answer = await rig.ask(f"/{made['id']}{rest}", method=method)
        assert (answer.status, answer.json()["error"]["param"]) == (404, "completion_id")
    assert (await rig.ask(f"/{made['id']}", {"metadata": {}}, "POST")).status == 404


async def test_a_stream_is_kept_as_the_whole_answer() -> None:
    def script(_: Any) -> Any:
        return [[delta(0, "Hello"), delta(1, "He")], [delta(0, " you", "stop"), delta(1, "y", "length")]]

    rig = Rig(FakeDataPlane(script))
    whole = await rig.chat(n=2, metadata={"a": "b"}, logprobs=False)
    streamed = await rig.ask("", BODY | {"n": 2, "metadata": {"a": "b"}, "stream": True}, "POST")
    chunk = next(event for event in streamed.events() if isinstance(event, dict))
    kept = (await rig.ask(f"/{chunk['id']}")).json()
    assert kept == whole | {"id": chunk["id"], "created": chunk["created"]}
    assert [choice["message"]["content"] for choice in kept["choices"]] == ["Hello you", "Hey"]


async def test_a_stream_that_fails_is_not_kept() -> None:
    rig = Rig(FakeDataPlane(lambda _: [[delta(0, "a")], RuntimeError("no")]))
    await rig.ask("", BODY | {"stream": True}, "POST")
    assert await rig.ids() == []


async def test_its_messages(rig: Rig) -> None:
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    sent: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "Ada"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "x"},
    ]
    made = (await rig.chat(messages=sent))["id"]
    shown = (await rig.ask(f"/{made}/messages")).json()
    nothing = {"name": None, "content": None, "content_parts": None}
    assert shown["data"] == [
        nothing | sent[0] | {"id": f"{made}-0", "content": None, "content_parts": sent[0]["content"]},
        nothing | sent[1] | {"id": f"{made}-1"},
        nothing | sent[2] | {"id": f"{made}-2"},
    ]
    assert await rig.ids(f"/{made}/messages?order=desc&limit=1") == [f"{made}-2"]
    assert await rig.ids(f"/{made}/messages?after={made}-1") == [f"{made}-2"]


async def test_lists_are_ordered_cut_and_filtered(rig: Rig) -> None:
    made = [(await rig.chat(metadata=metadata))["id"] for metadata in ({}, {"a": "b"}, {"a": "b", "c": "d"})]
    await rig.chat(store=False)
    assert await rig.ids() == made
    assert await rig.ids("?order=desc&limit=2") == [made[2], made[1]]
    assert await rig.ids(f"?after={made[0]}") == made[1:]
    assert await rig.ids("?model=tiny&metadata[a]=b") == made[1:]
    assert await rig.ids("?metadata%5Ba%5D=b&metadata[c]=d") == made[2:]
    assert await rig.ids("?model=other") == []
    first = (await rig.ask("?limit=1")).json()
    assert (first["object"], first["has_more"], first["first_id"]) == ("list", True, made[0])


@pytest.mark.parametrize(
    ("query", "param"),
    [("?limit=0", "limit"), ("?order=up", "order"), ("?after=x", "after"), ("?metadata=x", "metadata")],
)
async def test_bad_queries(rig: Rig, query: str, param: str) -> None:
    answer = await rig.ask(query)
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("body", [{}, {"metadata": 5}, {"metadata": {"a": "x" * 513}}])
async def test_bad_changes(rig: Rig, body: dict[str, Any]) -> None:
    made = await rig.chat(metadata={"a": "b"})
    answer = await rig.ask(f"/{made['id']}", body, "POST")
    assert (answer.status, answer.json()["error"]["param"]) == (400, "metadata")
    assert (await rig.ask(f"/{made['id']}")).json() == made


async def test_nobody_else_sees_it() -> None:
    rig = Rig(keys=api_keys({"one": "k1", "two": "k2"}))
    own, other = ({"headers": {"authorization": f"Bearer {key}"}} for key in ("k1", "k2"))
    made = (await rig.ask("", BODY, "POST", **own)).json()["id"]
    assert await rig.ids(**own) == [made]
    assert await rig.ids(**other) == []
    for rest, method, body in (("", "GET", b""), ("/messages", "GET", b""), ("", "POST", {"metadata": {}})):
        assert (await rig.ask(f"/{made}{rest}", body, method, **other)).status == 404
    assert (await rig.ask(f"/{made}", method="DELETE", **other)).status == 404
    assert await rig.ids(**own) == [made]


async def test_the_one_that_was_not_used_for_longest_goes_first() -> None:
    rig = Rig(stored_responses=2)
    first, second = [(await rig.chat())["id"] for _ in range(2)]
    await rig.ask(f"/{first}")
    third = (await rig.chat())["id"]
    assert await rig.ids() == [first, third]
    assert (await rig.ask(f"/{second}")).status == 404


async def test_one_that_is_too_large_is_not_kept(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(stored_responses_memory=4000)
    made = await rig.chat(messages=[HI | {"content": "x" * 2000}])
    assert await rig.ids() == []
    assert f"chat {made['id']} is too large to be kept" in caplog.text


async def test_old_ones_are_deleted(rig: Rig) -> None:
    made = (await rig.chat())["id"]
    await rig.service.chats.delete_old(time.time() - 100)
    assert await rig.ids() == [made]
    await rig.service.chats.delete_old(time.time() + 1)
    assert await rig.ids() == []


async def test_a_server_that_keeps_nothing() -> None:
    rig = Rig(stored_responses=0)
    refused = await rig.ask("", BODY, "POST")
    assert (refused.status, refused.json()["error"]["param"]) == (400, "store")
    listed = await rig.ask()
    assert listed.status == 400
    assert "--stored-responses" in listed.json()["error"]["message"]
    assert (await rig.ask("", BODY | {"store": False}, "POST")).status == 200


async def test_lines_of_batches_are_in_a_file_and_not_kept_beside_it() -> None:
    plane = FakeDataPlane()
    settings = AppSettings()
    lines = batch_endpoints(plane, settings, PoolingPlane(plane.models))[PATH]
    refused = await call(App([Route("POST", PATH, INFER, lines)], settings), PATH, BODY)
    assert (refused.status, refused.json()["error"]["param"]) == (400, "store")


@pytest.mark.parametrize(("name", "hint"), [("batch", "/v1/batches"), ("input_tokens", "/tokenize"), ("other", "")])
async def test_routes_of_other_servers_are_no_chats(rig: Rig, name: str, hint: str) -> None:
    answer = await rig.ask(f"/{name}", {"messages": []}, "POST")
    error = answer.json()["error"]
    assert (answer.status, error["code"]) == (404, "route_not_found")
    assert hint in error["message"]
