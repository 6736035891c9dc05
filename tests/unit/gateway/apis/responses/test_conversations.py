"""Conversations: their items, what responses add to them, whose they are, and what is refused."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import pytest
from starlette.types import ASGIApp

from penstock.gateway.apis.responses.service import ResponseService
from penstock.gateway.database import Database
from penstock.gateway.models.language.dataplane import GenerateRequest
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from protocol.asgi_client import AsgiCall, call
from protocol.fake_dataplane import FakeDataPlane, Step, delta
from support.keys import api_keys
from support.responses import validated_item, validated_response

PATH = "/v1/conversations"
HI = {"role": "user", "content": "hi"}


class Rig:
    def __init__(self, **settings: Any) -> None:
        self.plane = FakeDataPlane()
        self.service = ResponseService(Database(None), AppSettings(**settings))
        self.app: ASGIApp = build_app(self.plane, AppSettings(**settings), responses=self.service)

    async def ask(self, rest: str = "", body: Any = b"", method: str = "POST", **options: Any) -> AsgiCall:
        return await call(self.app, f"{PATH}{rest}", body, method=method, **options)

    async def made(self, *items: Any, **fields: Any) -> str:
        answer = await self.ask("", {"items": list(items)} | fields)
        assert answer.status == 200, answer.json()
        return str(answer.json()["id"])

    async def respond(self, **fields: Any) -> AsgiCall:
        return await call(self.app, "/v1/responses", {"model": "tiny", "input": "And?"} | fields)

    async def items(self, conversation_id: str, query: str = "?order=asc") -> list[dict[str, Any]]:
        answer = await self.ask(f"/{conversation_id}/items{query}", method="GET")
        assert answer.status == 200, answer.json()
        return [validated_item(item) for item in answer.json()["data"]]

    async def texts(self, conversation_id: str) -> list[str]:
        return [item["content"][0]["text"] for item in await self.items(conversation_id)]


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_a_conversation_from_its_beginning_to_its_end(rig: Rig) -> None:
    made = (await rig.ask("", {"metadata": {"a": "b"}, "items": [HI]})).json()
    conversation_id = made["id"]
    assert conversation_id.startswith("conv_")
    assert abs(made.pop("created_at") - time.time()) < 100
    assert made == {"id": conversation_id, "object": "conversation", "metadata": {"a": "b"}}
    changed = (await rig.ask(f"/{conversation_id}", {"metadata": {"c": "d"}})).json()
    assert changed["metadata"] == {"c": "d"}
    assert (await rig.ask(f"/{conversation_id}", method="GET")).json() == changed
    assert await rig.texts(conversation_id) == ["hi"]
    gone = await rig.ask(f"/{conversation_id}", method="DELETE")
    assert gone.json() == {"id": conversation_id, "object": "conversation.deleted", "deleted": True}
    for rest in ("", "/items", "/items/x"):
        assert (await rig.ask(f"/{conversation_id}{rest}", method="GET")).status == 404


async def test_items_are_added_listed_read_and_deleted(rig: Rig) -> None:
    conversation_id = await rig.made()
    first = {"id": "msg_own"} | HI
    added = (await rig.ask(f"/{conversation_id}/items", {"items": [first, HI | {"content": "you"}]})).json()
    ids = [item["id"] for item in added["data"]]
    assert (added["object"], added["first_id"], ids[0]) == ("list", ids[0], "msg_own")
    assert await rig.texts(conversation_id) == ["hi", "you"]
    assert [item["id"] for item in await rig.items(conversation_id, "?limit=1")] == ids[1:]
    assert [item["id"] for item in await rig.items(conversation_id, f"?after={ids[1]}")] == ids[:1]
    one = (await rig.ask(f"/{conversation_id}/items/{ids[1]}", method="GET")).json()
    assert one == added["data"][1]
    [again] = (await rig.ask(f"/{conversation_id}/items", {"items": [first]})).json()["data"]
    assert again["id"] not in ids, "each has an id of its own"
    left = (await rig.ask(f"/{conversation_id}/items/{ids[0]}", method="DELETE")).json()
    assert (left["id"], left["object"]) == (conversation_id, "conversation")
    assert await rig.texts(conversation_id) == ["you", "hi"]
    assert (await rig.ask(f"/{conversation_id}/items/{ids[0]}", method="DELETE")).status == 404


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("store", [False, True])
async def test_responses_add_to_a_conversation_and_go_on_from_it(rig: Rig, stream: bool, store: bool) -> None:
    conversation_id = await rig.made(HI)
    answer = await rig.respond(conversation=conversation_id, stream=stream, store=store)
    assert answer.status == 200
    assert await rig.texts(conversation_id) == ["hi", "And?", "one two three"]
    second = await rig.respond(conversation={"id": conversation_id}, input="So?")
    assert validated_response(second.json())["conversation"] == {"id": conversation_id}
    said = [message["content"] for message in rig.plane.prompts[-1][0]]
    assert said == ["hi", "And?", "one two three", "So?"]
    assert second.json()["output"][0]["id"] == (await rig.items(conversation_id))[-1]["id"]
    listed = await call(rig.app, f"/v1/responses/{second.json()['id']}/input_items", method="GET")
    assert [item["content"][0]["text"] for item in listed.json()["data"]] == ["So?"]


async def test_a_response_that_fails_adds_nothing(rig: Rig) -> None:
    def script(request: GenerateRequest) -> Iterable[Step]:
        yield [delta(0, "a")]
        yield ValueError("bug")

    rig.plane.script = script
    conversation_id = await rig.made(HI)
    await rig.respond(conversation=conversation_id, stream=True)
    assert await rig.texts(conversation_id) == ["hi"]


async def test_a_response_of_a_conversation_is_gone_on_from_by_the_conversation_alone(rig: Rig) -> None:
    first = await rig.respond(conversation=await rig.made(HI))
    answer = await rig.respond(previous_response_id=first.json()["id"])
    assert (answer.status, answer.json()["error"]["param"]) == (400, "previous_response_id")


async def test_a_conversation_that_is_deleted_meanwhile_stays_deleted(rig: Rig) -> None:
    conversation_id = await rig.made(HI)
    rig.service.conversations.append(conversation_id, "nobody", [])
    await rig.ask(f"/{conversation_id}", method="DELETE")
    rig.service.conversations.append(conversation_id, "", [HI | {"id": "x", "type": "message"}])
    assert (await rig.ask(f"/{conversation_id}", method="GET")).status == 404


CALL = {"type": "function_call", "call_id": "1", "name": "time", "arguments": "{}"}


async def test_a_call_without_its_output_does_not_end_a_conversation(rig: Rig) -> None:
    conversation_id = await rig.made(HI, CALL)
    answer = await rig.respond(conversation=conversation_id, store=False)
    assert (answer.status, answer.headers["x-penstock-ignored"]) == (200, "conversation.call_id")
    assert [message["role"] for message in rig.plane.prompts[-1][0]] == ["user", "assistant", "tool", "user"]
    result = {"type": "function_call_output", "call_id": "1", "output": "noon"}
    answer = await rig.respond(conversation=conversation_id, input=[result])
    assert (answer.status, "x-penstock-ignored" in answer.headers) == (200, False)


@pytest.mark.parametrize(
    ("method", "rest", "body", "param"),
    [
        ("POST", "", {"metadata": {"a": "x" * 513}}, "metadata"),
        ("POST", "", {"metadata": 5}, "metadata"),
        ("POST", "", {"items": [{"type": "item_reference"}]}, "items[0].id"),
        ("POST", "", {"items": [{"content": "x"}]}, "items[0].role"),
        ("POST", "", {"items": [HI] * 21}, "items"),
        ("POST", "", b"[]", None),
        ("POST", "/{id}", {}, "metadata"),
        ("POST", "/{id}", {"metadata": {"a": 5}}, "metadata[...]"),
        ("POST", "/{id}/items", {}, "items"),
        ("POST", "/{id}/items", {"items": []}, "items"),
        ("POST", "/{id}/items", {"items": [5]}, "items[0]"),
        ("GET", "/{id}/items?limit=0", b"", "limit"),
        ("GET", "/{id}/items?after=nothing", b"", "after"),
    ],
)
async def test_what_is_refused(rig: Rig, method: str, rest: str, body: Any, param: str | None) -> None:
    answer = await rig.ask(rest.replace("{id}", await rig.made(HI)), body, method)
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("method", "rest", "body"),
    [
        ("GET", "", b""),
        ("POST", "", {"metadata": {}}),
        ("DELETE", "", b""),
        ("GET", "/items", b""),
        ("POST", "/items", {"items": [HI]}),
        ("GET", "/items/x", b""),
        ("DELETE", "/items/x", b""),
    ],
)
async def test_a_conversation_belongs_to_its_tenant(method: str, rest: str, body: Any) -> None:
    rig = Rig(keys=api_keys({"red": "r", "blue": "b"}))
    red, blue = ({"authorization": f"Bearer {key}"} for key in "rb")
    made = (await rig.ask("", {"items": [HI | {"id": "x"}]}, headers=red)).json()["id"]
    answer = await rig.ask(f"/{made}{rest}", body, method, headers=blue)
    assert (answer.status, answer.json()["error"]["param"]) == (404, "conversation_id")
    used = {"model": "tiny", "input": "hi", "conversation": made}
    assert (await call(rig.app, "/v1/responses", used, headers=blue)).status == 404
    assert (await rig.ask(f"/{made}{rest}", body, method, headers=red)).status == 200


async def test_a_conversation_is_bounded() -> None:
    rig = Rig(stored_responses_memory=6000)
    large = HI | {"content": "x" * 6000}
    for rest, param in (("", "items"), (f"/{await rig.made()}/items", "items")):
        answer = await rig.ask(rest, {"items": [large]})
        assert (answer.status, answer.json()["error"]["param"]) == (400, param)
    answer = await rig.respond(conversation=await rig.made(), input="x" * 6000)
    assert (answer.status, answer.json()["error"]["param"]) == (400, "conversation")


async def test_the_one_that_was_not_used_for_longest_goes_first() -> None:
    rig = Rig(stored_responses=2)
    first, second = [await rig.made(HI) for _ in range(2)]
    await rig.items(first)
    third = await rig.made(HI)
    statuses = [(await rig.ask(f"/{each}", method="GET")).status for each in (first, second, third)]
    assert statuses == [200, 404, 200]


async def test_what_nobody_has_used_for_long_is_deleted(rig: Rig) -> None:
    conversation_id = await rig.made(HI)
    await rig.service.conversations.delete_old(time.time() - 100)
    assert await rig.texts(conversation_id) == ["hi"]
    await rig.service.conversations.delete_old(time.time() + 100)
    assert (await rig.ask(f"/{conversation_id}", method="GET")).status == 404


async def test_a_server_that_keeps_nothing() -> None:
    answer = await Rig(stored_responses=0).ask("", b"{}")
    assert answer.status == 400
    assert "--stored-responses" in answer.json()["error"]["message"]
