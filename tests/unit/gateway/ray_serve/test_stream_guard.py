"""What a proxy makes of replicas that die, and of Serve's own refusals."""

from __future__ import annotations

import asyncio
import json

import pytest

from penstock.gateway.ray_serve.prefix_key import LARGEST_BODY, MARK, RouteKey, session_hash
from penstock.gateway.ray_serve.stream_guard import BODY, REPLICA_HEADER, StreamGuard
from protocol.asgi_client import AsgiCall

EVENTS = b"text/event-stream; charset=utf-8"
CHAT = "/v1/chat/completions"
TOKEN = b'data: {"choices": []}\n\n'


class Replicas:
    """The app of a proxy: each request goes to the next of these, which is what it does with its answer."""

    def __init__(self, *behaviours: str, content_type: bytes = EVENTS) -> None:
        self.behaviours = list(behaviours)
        self.bodies: list[bytes] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.carried: list[bytes | None] = []
        self._content_type = content_type

    async def __call__(self, scope, receive, send) -> None:
        behaviour = self.behaviours[len(self.bodies)]
        self.headers.append(dict(scope["headers"]))
        self.carried.append(scope.get(BODY))
        scope["headers"].append((b"x-request-id", b"made-by-serve"))
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.bodies.append(body)
        if behaviour == "dies":
            return
        if behaviour == "raises":
            raise RuntimeError
        if behaviour.isdigit():
            await send({"type": "http.response.start", "status": int(behaviour), "headers": []})
            await send({"type": "http.response.body", "body": b"Serve's words", "more_body": False})
            return
        headers = [(b"content-type", self._content_type), (REPLICA_HEADER, b"r%d" % len(self.bodies))]
        status = 503 if behaviour == "refuses" else 200
        await send({"type": "http.response.start", "status": status, "headers": headers})
        if behaviour == "says its head":
            return
        await send({"type": "http.response.body", "body": TOKEN, "more_body": True})
        if behaviour == "waits":
            while (await receive())["type"] != "http.disconnect":
                pass
        elif behaviour in ("answers", "refuses"):
            await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def guarded(replicas: Replicas, path: str = CHAT, **request: object) -> AsgiCall:
    return AsgiCall(StreamGuard(replicas, b"x-session-id"), path, **{"body": {"model": "m"}, **request})


async def test_a_whole_answer_passes_unchanged():
    call = await guarded(Replicas("answers")).run()
    assert [message.get("body") for message in call.messages] == [None, TOKEN, b"data: [DONE]\n\n"]


@pytest.mark.parametrize(
    ("path", "content_type", "last"),
    [
        (CHAT, EVENTS, b"data: [DONE]\n\n"),
        ("/prefix/v1/completions", EVENTS, b"data: [DONE]\n\n"),
        ("/v1/messages", EVENTS, b"event: error\n"),
        ("/api/chat", b"application/x-ndjson", b'{"error":'),
        ("/v2/models/m/versions/1/generate_stream", EVENTS, b'data: {"error":'),
    ],
)
async def test_a_stream_that_is_cut_ends_with_the_error_of_its_protocol(path, content_type, last):
    call = await guarded(Replicas("streams", content_type=content_type), path).run()
    assert call.messages[-2]["body"] == TOKEN
    end = call.messages[-1]
    assert last in end["body"]
    assert b"has ended" in end["body"]
    assert not end["more_body"]


async def test_an_answer_that_is_no_stream_stays_incomplete():
    call = await guarded(Replicas("streams", content_type=b"application/json")).run()
    assert call.messages[-1]["more_body"]


@pytest.mark.parametrize("fate", ["dies", "raises", "says its head"])
async def test_a_request_without_an_answer_goes_to_another_replica(fate):
    replicas = Replicas(fate, fate, "answers")
    call = await guarded(replicas, body=[b'{"model":', b' "m"}']).run()
    assert replicas.bodies == [b'{"model": "m"}'] * 3
    assert replicas.headers[0] == replicas.headers[2]
    assert call.messages[0]["status"] == 200
    assert len(call.messages) == 3


async def test_a_replica_that_cannot_serve_now_is_not_asked_again():
    replicas = Replicas("refuses", "refuses", "answers")
    call = await guarded(replicas).run()
    told = [RouteKey.read(headers.get(b"x-session-id", b"").decode()).avoid for headers in replicas.headers]
    assert told == [(), ("r1",), ("r1", "r2")]
    assert call.messages[0]["status"] == 200
    assert call.messages[-1]["body"] == b"data: [DONE]\n\n"


async def test_the_last_refusal_is_the_answer():
    call = await guarded(Replicas("refuses", "refuses", "refuses")).run()
    assert [message.get("status") for message in call.messages] == [503, None, None]


async def test_after_some_tries_it_is_an_error_with_retry_after():
    call = await guarded(Replicas("dies", "dies", "dies")).run()
    head, body = call.messages
    assert head["status"] == 503
    assert dict(head["headers"])[b"retry-after"] == b"2"
    assert json.loads(body["body"])["error"]["code"] == "engine_dead"


async def test_a_classic_model_is_not_asked_twice():
    replicas = Replicas("dies", "answers")
    call = await guarded(replicas, "/v2/models/add_sub/infer").run()
    assert len(replicas.bodies) == 1
    assert "error" in json.loads(call.messages[1]["body"])


@pytest.mark.parametrize(("theirs", "ours", "code"), [(503, 503, "overloaded"), (408, 504, "deadline_exceeded")])
async def test_serves_own_refusals_are_said_in_the_caller_s_form(theirs, ours, code):
    call = await guarded(Replicas(str(theirs))).run()
    head, body = call.messages
    assert head["status"] == ours
    assert json.loads(body["body"])["error"]["code"] == code


async def test_a_client_that_leaves_gets_nothing_more_and_is_no_reason_to_try_again():
    replicas = Replicas("waits", "answers")
    call = guarded(replicas)
    running = asyncio.create_task(call.run())
    await call.sent.wait()
    call.disconnect()
    await running
    assert call.messages[-1]["body"] == TOKEN
    left = Replicas("answers")
    await guarded(left, body=[b"{", None]).run()
    assert not left.bodies


async def test_other_paths_and_methods_are_left_alone():
    for path, method in (("/other/app", "POST"), (CHAT, "GET")):
        replicas = Replicas("streams")
        call = await guarded(replicas, path, method=method, headers={"x-session-id": "theirs"}).run()
        assert call.messages[-1]["body"] == TOKEN
        assert replicas.headers[0][b"x-session-id"] == b"theirs"


async def test_the_session_header_carries_the_prompt_s_key():
    replicas = Replicas("answers")
    await guarded(replicas, body={"prompt": "x" * 1000}, headers={"x-session-id": "s"}).run()
    key = RouteKey.read(replicas.headers[0][b"x-session-id"].decode())
    assert len(key.hashes) > 2
    assert key.hashes[-1] == session_hash("s")


async def test_a_client_cannot_bring_a_key_of_its_own():
    replicas = Replicas("answers")
    await guarded(replicas, body=b"no json", headers={"x-session-id": MARK + "forged"}).run()
    assert b"forged" not in replicas.headers[0].get(b"x-session-id", b"")


async def test_a_body_goes_with_the_scope_to_each_replica_that_is_asked():
    replicas = Replicas("dies", "answers")
    await guarded(replicas, body=[b'{"model":', b'"m"}']).run()
    assert replicas.carried == replicas.bodies == [b'{"model":"m"}'] * 2


async def test_a_large_body_passes_as_it_comes_and_is_sent_once():
    chunks = [b"x" * (LARGEST_BODY // 2)] * 4
    replicas = Replicas("dies", "answers")
    call = await guarded(replicas, body=chunks).run()
    assert replicas.bodies == [b"".join(chunks)]
    assert replicas.carried == [None]
    assert call.messages[0]["status"] == 503
