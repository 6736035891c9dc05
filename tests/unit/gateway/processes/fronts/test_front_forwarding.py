"""Requests that a front passes on, and what it relays of the supervisor's answers."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import grpc
import msgspec
import pytest
from starlette.types import ASGIApp, Message

from penstock.engines.errors import InvalidRequestError, OverloadedError
from penstock.gateway.processes.fronts.forwarding import Forwarder, _relay_answer
from penstock.gateway.processes.fronts.passed_requests import PassedRequests
from penstock.gateway.processes.fronts.passing import (
    AnswerEnd,
    AnswerStart,
    FromAnswering,
    FromPassing,
    Passage,
    PassedDropped,
    PassedPiece,
)
from protocol.asgi_client import AsgiCall, call

MIB = 1 << 20


class Border:
    """Both sides, and what they say to each other as bytes; each message comes in a turn of the loop of its own."""

    def __init__(self, app: Any = None, handle: Any = None, most: int = 8) -> None:
        self.said: list[FromAnswering] = []
        self.heard: list[FromPassing] = []
        self.forwarder = Forwarder(self._up, most)
        self.passed = PassedRequests(app, lambda details: grpc.stream_stream_rpc_method_handler(handle), self._down)

    def _up(self, message: FromPassing, *, tail: bytes = b"") -> None:
        self.heard.append(message)
        self._later(self.passed.heard, message, FromPassing, tail)

    def _down(self, message: FromAnswering, *, tail: bytes = b"") -> None:
        self.said.append(message)
        self._later(self.forwarder.heard, message, FromAnswering, tail)

    def _later(self, hear: Callable[[Any, memoryview], None], message: Any, kind: Any, tail: bytes) -> None:
        data, padded = msgspec.msgpack.encode(message), memoryview(bytes(tail) + bytes(8))
        asyncio.get_running_loop().call_soon(lambda: hear(msgspec.msgpack.decode(data, type=kind), padded))


async def settle() -> None:
    for _ in range(200):
        await asyncio.sleep(0)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0)


def answering(body: bytes) -> ASGIApp:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": False})

    return app


async def relayed(headers: list[tuple[bytes, bytes]], *messages: Any) -> list[tuple[bytes, bool]]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    passage = Passage(1, lambda message, tail=b"": None, lambda: None)
    for message in (AnswerStart(1, 200, headers), *messages):
        if isinstance(message, bytes):
            passage.heard(PassedPiece(1, len(message), True), memoryview(message))
        else:
            passage.heard(message, memoryview(b""))
    await _relay_answer(passage, send)
    return [(message["body"], message["more_body"]) for message in sent[1:]]


async def test_an_answer_is_over_with_its_last_byte() -> None:
    """Its client has it all then, and may send the next request before the supervisor says that this was the end."""
    headers = [(b"content-length", b"4")]
    pieces = b"ab", b"cd"
    assert await relayed(headers, *pieces, AnswerEnd(1)) == [(b"ab", True), (b"cd", False)]


async def test_a_stream_is_over_when_the_supervisor_says_so() -> None:
    pieces = b"ab", b"cd"
    assert await relayed([], *pieces, AnswerEnd(1)) == [(b"ab", True), (b"cd", True), (b"", False)]


async def test_a_client_that_reads_slowly_holds_up_nobody_and_little_waits_for_it() -> None:
    border = Border(answering(bytes(8 * MIB)))
    reading, sent = asyncio.Event(), bytearray()

    async def slow(message: Message) -> None:
        await reading.wait()
        sent.extend(message.get("body", b""))

    client = AsgiCall(border.forwarder.http, "/v1/models")
    scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
    waiting = asyncio.create_task(border.forwarder.http(scope, client._receive, slow))
    await settle()
    on_its_way = sum(message.size for message in border.said if isinstance(message, PassedPiece))
    assert 0 < on_its_way <= 2 * MIB
    border.passed._app = answering(b"quick")
    assert (await call(border.forwarder.http, "/v1/models")).bodies == [b"quick", b""]
    assert not waiting.done()
    reading.set()
    await waiting
    assert bytes(sent) == bytes(8 * MIB)


async def test_a_body_that_nobody_reads_waits_at_the_front() -> None:
    """Until the answer is there: then the rest of it is not sent."""
    answers = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answers.wait()
        await send({"type": "http.response.start", "status": 413, "headers": []})
        await send({"type": "http.response.body", "body": b"too long", "more_body": False})

    border = Border(app)
    asking = asyncio.create_task(call(border.forwarder.http, "/v1/files", bytes(8 * MIB)))
    await settle()
    assert sum(message.size for message in border.heard if isinstance(message, PassedPiece)) <= 2 * MIB
    answers.set()
    answer = await asking
    assert (answer.status, answer.bodies) == (413, [b"too long", b""])
    await settle()
    assert not border.forwarder._passages
    assert not border.passed._passages


async def test_a_client_that_leaves_ends_its_request_at_the_supervisor() -> None:
    events: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while (message := await receive())["type"] != "http.disconnect":
            pass
        events.append(message["type"])

    border = Border(app)
    client = AsgiCall(border.forwarder.http, "/v1/chat/completions")
    asking = asyncio.create_task(client.run())
    await client.sent.wait()
    client.disconnect()
    await asking
    await until(lambda: bool(events))
    await settle()
    assert not border.passed._passages


async def test_requests_end_with_the_process_that_answers_them() -> None:
    border = Border(answering(bytes(8 * MIB)))
    asking = asyncio.create_task(call(border.forwarder.http, "/v1/files", bytes(8 * MIB)))
    await asyncio.sleep(0)
    border.forwarder.lost()
    assert (await asking).status == 503
    assert (await call(border.forwarder.http, "/v1/models")).status == 503
    border.passed.lost()
    await until(lambda: not border.passed._passages)


async def test_an_app_that_fails_is_told_as_a_request_that_does_not_go_on(caplog: pytest.LogCaptureFixture) -> None:
    border = Border(AsyncMock(side_effect=ValueError("a fault")))
    assert (await call(border.forwarder.http, "/v1/models")).status == 503
    assert "a request from a front failed" in caplog.text


async def test_an_app_that_watches_its_client_until_its_answer_is_given_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        watching = asyncio.create_task(receive())
        await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"answer", "more_body": False})
        watching.cancel()

    border = Border(app)
    answer = await call(border.forwarder.http, "/v1/models")
    await border.passed.stop()
    assert answer.status == 200
    assert not caplog.records


async def test_a_front_passes_on_a_bounded_number_of_requests() -> None:
    border = Border(most=2)
    forwarder = border.forwarder
    passages = [forwarder._passage() for _ in range(2)]
    with pytest.raises(OverloadedError, match="Too many requests wait"):
        forwarder._passage()
    refused = await call(forwarder.http, "/v1/models")
    assert refused.status == 503
    assert refused.headers["retry-after"] == "2"
    passages.pop().close()
    passages.append(forwarder._passage())


async def test_a_request_that_was_passed_on_leaves_no_cycle() -> None:
    border = Border(answering(bytes(MIB)))
    await call(border.forwarder.http, "/v1/models")
    await settle()
    gc.collect()
    gc.disable()
    try:
        for _ in range(5):
            answer = await call(border.forwarder.http, "/v1/files", bytes(MIB))
            assert answer.complete
        await settle()
        assert not [each for each in gc.get_objects() if isinstance(each, Passage)]
    finally:
        gc.enable()


# gRPC


def rpc(read: Callable[[], Awaitable[Any]], **fields: Any) -> Any:
    calls = {"invocation_metadata": tuple, "time_remaining": lambda: None, "set_trailing_metadata": lambda items: None}
    return SimpleNamespace(read=read, write=AsyncMock(), abort=AsyncMock(), **calls | fields)


async def test_messages_of_any_length_arrive_whole_and_in_order() -> None:
    async def echo(_: object, call: Any) -> None:
        while (data := await call.read()) is not grpc.aio.EOF:
            await call.write(data)

    border = Border(handle=echo)
    messages = [b"", b"short", bytes(3 * MIB) + b"end", bytes(64 << 10), b"last"]
    caller = rpc(AsyncMock(side_effect=[*messages, grpc.aio.EOF]))
    async with asyncio.timeout(20):
        await border.forwarder.call("/s/m", caller)
    assert [args.args[0] for args in caller.write.await_args_list] == messages
    async with asyncio.timeout(20):
        assert await border.forwarder.unary("/s/m", rpc(AsyncMock()), bytes(MIB)) == bytes(MIB)


async def test_a_message_that_cannot_be_read_ends_a_call_that_is_passed_on() -> None:
    """The supervisor waits for more of it, and would do so for ever."""
    ended = asyncio.Event()

    async def handle(_: object, call: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    border = Border(handle=handle)
    asking = border.forwarder.call("/s/m", rpc(AsyncMock(side_effect=[b"first", InvalidRequestError("not gzip")])))
    async with asyncio.timeout(20):
        with pytest.raises(InvalidRequestError, match="not gzip"):
            await asking
        assert not border.forwarder._passages
        await ended.wait()
    assert isinstance(border.heard[-1], PassedDropped)


async def test_a_caller_that_writes_to_an_rpc_that_has_ended_is_told() -> None:
    """It waits until the handler reads on, and that one has given up."""

    async def handle(_: object, call: Any) -> None:
        await call.read()
        await call.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "enough")

    border = Border(handle=handle)
    forwarded = border.forwarder.open("/s/m", rpc(AsyncMock()), AsyncMock())
    async with asyncio.timeout(20):
        await forwarded.send(b"first")
        with pytest.raises(ConnectionError):
            await forwarded.send(bytes(8 * MIB))
    end = await forwarded.relaying
    forwarded.close()
    assert (end.code, end.details) == (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], "enough")
    with suppress(ConnectionError):
        await forwarded.send(b"late")
