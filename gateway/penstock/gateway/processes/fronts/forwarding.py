"""A front's side of requests that the supervisor answers: bytes in, bytes out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

import grpc
from starlette.types import Receive, Scope, Send

from penstock.engines.errors import NotReadyError, OverloadedError, PenstockError
from penstock.gateway.apis.kserve.grpc.rpc import Rpc
from penstock.gateway.errors import error_json
from penstock.gateway.processes.fronts.passing import (
    AnswerEnd,
    AnswerStart,
    BodyEnd,
    CallEnd,
    FromAnswering,
    Passage,
    PassedCall,
    PassedRequest,
    Tell,
)
from penstock.gateway.transports.http.exchange import ARRIVAL_KEY

_EOF = grpc.aio.EOF
_CODES = {code.value[0]: code for code in grpc.StatusCode}
_RETRY_AFTER = 2.0


class Forwarder:
    def __init__(self, tell: Tell, most: int) -> None:
        """`most` requests are passed on at a time: their bodies take
        memory of both processes."""
        self._tell = tell
        self._most = most
        self._numbers = 0
        self._passages: dict[int, Passage] = {}
        self._is_lost = False

    def heard(self, message: FromAnswering, tail: memoryview) -> None:
        passage = self._passages.get(message.number)
        if passage is not None:
            passage.heard(message, tail)

    def lost(self) -> None:
        """The supervisor has gone."""
        self._is_lost = True
        for passage in list(self._passages.values()):
            passage.lost()

    def _passage(self) -> Passage:
        """To be closed. Raises NotReadyError, OverloadedError."""
        if self._is_lost:
            raise _shutting_down()
        if len(self._passages) >= self._most:
            raise OverloadedError("Too many requests wait for the server's main process.", retry_after=_RETRY_AFTER)
        self._numbers += 1
        number = self._numbers
        passage = self._passages[number] = Passage(number, self._tell, partial(self._passages.pop, number, None))
        return passage

    async def http(self, scope: Scope, receive: Receive, send: Send, body: bytes | None = None) -> None:
        """An ASGI application. `body`: where it has been read already."""
        try:
            passage = self._passage()
        except PenstockError as error:
            await _refuse(send, error)
            return
        sending = asyncio.create_task(_send_request(scope, receive, passage, body))
        try:
            await _relay_answer(passage, send)
        finally:
            sending.cancel()
            passage.close()
            await asyncio.gather(sending, return_exceptions=True)

    def open(self, path: str, rpc: Rpc, write: Callable[[bytes], Awaitable[None]]) -> ForwardedCall:
        """An RPC, whose answers go to `write`. Raises NotReadyError, OverloadedError."""
        passage = self._passage()
        metadata = list(rpc.invocation_metadata())
        passage.say(PassedCall(passage.number, path=path, metadata=metadata, seconds=rpc.time_remaining()))
        return ForwardedCall(passage, write)

    async def call(self, path: str, rpc: Rpc, first: bytes | None = None) -> None:
        """All of an RPC of any kind. `first`: a message that has been read already. Raises PenstockError for a message
        that cannot be read."""
        call = self.open(path, rpc, rpc.write)
        sending = asyncio.create_task(_send_messages(rpc, call, first))
        try:
            await asyncio.wait((sending, call.relaying), return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            await end_rpc(rpc, await call.relaying)
        finally:
            sending.cancel()
            call.close()
            await asyncio.gather(sending, return_exceptions=True)

    async def unary(self, path: str, rpc: Rpc, message: bytes) -> bytes:
        """The answer to the one message of an RPC."""
        answers: list[bytes] = []

        async def keep(data: bytes) -> None:
            answers.append(data)

        call = self.open(path, rpc, keep)
        try:
            with suppress(ConnectionError):  # it has ended the RPC already
                await call.send(message)
                call.end()
            await end_rpc(rpc, await call.relaying)
        finally:
            call.close()
        return answers[0]


class ForwardedCall:
    """An RPC that the supervisor answers."""

    def __init__(self, passage: Passage, write: Callable[[bytes], Awaitable[None]]) -> None:
        self._passage = passage
        self.relaying = asyncio.create_task(_relay_messages(passage, write))
        """Done when all answers are written."""

    async def send(self, message: bytes) -> None:
        """Raises ConnectionError where the supervisor has ended it."""
        await self._passage.send_message(message)

    def end(self) -> None:
        """No more messages."""
        self._passage.say(BodyEnd(self._passage.number))

    def close(self) -> None:
        """Nobody wants it any more. Idempotent."""
        self.relaying.cancel()
        self._passage.close()


async def _send_request(scope: Scope, receive: Receive, passage: Passage, body: bytes | None) -> None:
    """And gives it up when the client has left."""
    client, server = scope.get("client"), scope.get("server")
    passage.say(
        PassedRequest(
            passage.number,
            method=scope["method"],
            path=scope["path"],
            raw_path=scope.get("raw_path") or b"",
            query=scope.get("query_string", b""),
            headers=list(scope["headers"]),
            http_version=scope.get("http_version", ""),
            scheme=scope.get("scheme", "http"),
            client=None if client is None else tuple(client),
            server=None if server is None else tuple(server),
            arrival=scope.get(ARRIVAL_KEY) or time.monotonic(),
        )
    )
    with suppress(ConnectionError):
        if body is not None:
            await passage.send(body)
            passage.say(BodyEnd(passage.number))
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                passage.close()
                return
            if body is None:
                await passage.send(message.get("body", b""))
                if not message.get("more_body", False):
                    passage.say(BodyEnd(passage.number))
                    body = b""


async def _relay_answer(passage: Passage, send: Send) -> None:
    """A client that has all of a body by its length may send its next request at once: the answer has to be over by
    then, and not when the supervisor says so."""
    started, is_whole = False, False
    left = -1
    try:
        while True:
            message = await passage.receive()
            if isinstance(message, AnswerStart):
                started, left = True, _length(message.headers)
                await send({"type": "http.response.start", "status": message.status, "headers": message.headers})
                continue
            data = message if isinstance(message, bytes) else b""
            if started and not is_whole:
                left -= len(data)
                is_whole = left == 0 or isinstance(message, AnswerEnd)
                await send({"type": "http.response.body", "body": data, "more_body": not is_whole})
            if isinstance(message, AnswerEnd):
                return
    except ConnectionError:
        if not started:
            await _refuse(send, _shutting_down())


def _length(headers: Sequence[tuple[bytes, bytes]]) -> int:
    """Of a body; -1: its end is told."""
    return int(dict(headers).get(b"content-length", -1))


def _shutting_down() -> NotReadyError:
    """The supervisor is gone, or has given a request up without an answer."""
    return NotReadyError("The server is shutting down.", retry_after=_RETRY_AFTER)


async def _refuse(send: Send, error: PenstockError) -> None:
    body = error_json(error)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 503, "headers": [*headers, (b"retry-after", b"2")]})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def end_rpc(rpc: Rpc, finished: CallEnd) -> None:
    """As the supervisor has ended it: raises what `abort` does where that is an error."""
    rpc.set_trailing_metadata(tuple(finished.metadata))
    if finished.code:
        await rpc.abort(_CODES[finished.code], finished.details)


async def _send_messages(rpc: Rpc, call: ForwardedCall, first: bytes | None) -> None:
    data = await rpc.read() if first is None else first
    with suppress(ConnectionError):
        while data is not _EOF:
            await call.send(data)
            data = await rpc.read()
        call.end()


async def _relay_messages(passage: Passage, write: Callable[[bytes], Awaitable[None]]) -> CallEnd:
    with suppress(ConnectionError):
        while True:
            message = await passage.receive()
            if isinstance(message, CallEnd):
                return message
            if isinstance(message, bytes):
                await write(message)
    return CallEnd(passage.number, grpc.StatusCode.UNAVAILABLE.value[0], "The server is shutting down.", [])
