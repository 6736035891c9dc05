"""One request and its answer on a stream of HTTP/2, as an ASGI application sees them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from starlette.types import ASGIApp, Message

from penstock.engines.errors import PenstockError
from penstock.gateway.errors import HttpError
from penstock.gateway.front.connection_share import ConnectionShare
from penstock.gateway.front.intake import SMALL_BODY
from penstock.gateway.http.exchange import ARRIVAL_KEY, SENDER_KEY, Headers
from penstock.gateway.http.http2_heads import CONTINUE, AskedHead, answer_head, error_answer
from penstock.gateway.http.limits import ConnectionLimits
from penstock.gateway.http2.connection import Http2Connection
from penstock.gateway.http2.errors import ErrorCode

logger = logging.getLogger("penstock.http")

_HIGH_WATER = 32 << 10
"""Bytes of a stream that wait for the client before its writer has to wait, too. The state machine tells when less than
this is left."""
_BYTES_OF_FRAME = 256
"""A body may come in so small pieces on average, beside the number of chunks that is allowed."""


class Wire(Protocol):
    """What a stream needs of its connection."""

    http2: Http2Connection
    share: ConnectionShare

    def sent(self) -> None:
        """Something is queued in `http2`."""

    def credit(self, stream_id: int, size: int) -> None: ...
    def expect(self, stream_id: int, size: int) -> None:
        """So many more bytes of its body are going to be read at once."""

    def leave(self, text: str) -> None: ...
    def given_up(self) -> None:
        """A stream is over whose handler runs on."""

    def over(self, stream: HttpStream) -> None:
        """The handler has ended."""

    def default_headers(self) -> Headers: ...


class HttpStream:
    """ASGI's `receive` and `send`, and the BodyWriter of the answer."""

    def __init__(self, wire: Wire, stream_id: int, asked: AskedHead, size: int, limits: ConnectionLimits) -> None:
        """`size` is what the connection's share has been asked for already."""
        self.id = stream_id
        self.written = 0
        """Bytes of the answer's head and body; the frames around them are not counted."""
        self.gone = False
        """The stream is over before its answer is: the client has left, or been refused."""
        self._wire = wire
        self._http2 = wire.http2
        self._asked = asked
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        # The request
        self._pieces: list[bytes] = []
        self._received = self._read = self._frames = 0
        self._held = size
        """Bytes that count in the connection's share."""
        self._ended = False
        """All of the body has come."""
        self._taken = False
        """All of it is read."""
        self._continue = asked.expects_continue
        self._more: asyncio.Future[None] | None = None
        self._looked = self._loop.time()
        self._seen = 0
        """Bytes that had come then."""
        self._waited = self._idle = 0.0
        """Seconds in which the handler waited for the body, and since then any of it came."""
        # The answer
        self._head = b""
        """Waits for the body that it leaves with."""
        self._started = False
        self._complete = False
        self._drops_rest = False
        """What is left of the body is read only so that the client sees its answer; the stream ends then."""
        self._has_body = True
        self._left: int | None = None
        """Bytes of the body that are missing, where its length was told."""
        self._room: asyncio.Future[None] | None = None
        self._client_left: Callable[[], None] | None = None

    async def run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        scope[ARRIVAL_KEY] = time.monotonic()
        scope[SENDER_KEY] = self
        try:
            await app(scope, self.receive, self.send)
        except Exception as error:
            logger.error("a request failed", exc_info=error)
        finally:
            if not (self._complete or self.gone):
                self.refuse(HttpError(500, "The server could not complete the answer.", code="internal_error"))
            if self._drops_rest and not self.gone:
                await self._drop_rest()
            self._wire.share.give_back(self._held)
            self._wire.over(self)

    async def _drop_rest(self) -> None:
        """Of a body that was refused before its end: it is read and dropped for a while, since clients that are still
        sending, curl and httpx for two, show no answer when their stream is reset."""
        try:
            async with asyncio.timeout(self._limits.body_idle_timeout):
                while not (self._ended or self.gone):
                    self._more = self._loop.create_future()
                    await self._more
        except TimeoutError:
            pass
        self._http2.end(self.id)
        self._wire.sent()

    # The request

    def feed(self, data: bytes, *, ended: bool) -> None:
        """A piece of the body."""
        self._ended = ended
        if self._drops_rest:
            self._wire.credit(self.id, len(data))
            _wake(self._more)
            return
        self._received += len(data)
        self._frames += 1
        try:
            self._keep(data)
        except PenstockError as error:
            self.refuse(error)
        else:
            _wake(self._more)

    def _keep(self, data: bytes) -> None:
        if self._frames > self._limits.max_chunks + self._received // _BYTES_OF_FRAME:
            raise HttpError(400, "The request body has too many chunks.", code="too_many_chunks")
        if data:
            self._wire.share.take(len(data))
            self._held += len(data)
            self._pieces.append(data)

    async def receive(self) -> Message:
        while not (self.gone or self._complete):
            if self._pieces or (self._ended and not self._taken):
                return self._take()
            self._ask_for_more()
            self._more = self._loop.create_future()
            await self._more
        return {"type": "http.disconnect"}

    def _take(self) -> Message:
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._taken = self._ended
        beyond = len(body) - max(0, min(len(body), SMALL_BODY - self._read))
        self._read += len(body)
        self._wire.share.give_back(beyond)  # the app counts it once it reads that much
        self._held -= beyond
        if not self._ended:
            self._wire.credit(self.id, len(body))
        return {"type": "http.request", "body": body, "more_body": not self._ended}

    def _ask_for_more(self) -> None:
        if self._ended:
            return
        if self._continue and not self._started:
            self._continue = False
            if not self._received:
                self._http2.send_headers(self.id, CONTINUE)
                self._wire.sent()
        if self._asked.content_length is not None:
            self._wire.expect(self.id, self._asked.content_length - self._received)

    def late(self, now: float) -> bool:
        """The body comes too slowly. Looked at once a second; time in which nobody reads it does not count."""
        seconds, self._looked = now - self._looked, now
        if self._ended or self._more is None or self._more.done() or self._complete:
            return False
        self._waited += seconds
        self._idle = self._idle + seconds if self._received == self._seen else 0.0
        self._seen = self._received
        limits = self._limits
        idle = limits.body_idle_timeout
        too_slow = self._waited - idle > self._received / limits.body_rate
        return self._idle > idle or too_slow or self._waited > limits.body_timeout

    def disconnect(self) -> None:
        """Nothing more is received or sent."""
        if self.gone:
            return
        self.gone = True
        self._wire.given_up()
        self._pieces.clear()
        _wake(self._more)
        _wake(self._room)
        self._tell_client_left()

    def refuse(self, error: PenstockError) -> None:
        """Answers in the handler's stead where it has not begun to, and ends the stream."""
        if self._started:
            self._http2.reset(self.id, ErrorCode.INTERNAL_ERROR)
        else:
            block, body = error_answer(error, self._asked.method, self._wire.default_headers())
            whole_answer(self._http2, self.id, block, body)
        self._wire.sent()
        self.disconnect()

    # The answer

    async def send(self, message: Message) -> None:
        if self.gone:
            return
        if message["type"] == "http.response.start":
            self._start(message)
            return
        self._body(message.get("body", b""), more=message.get("more_body", False))
        if self._http2.unsent(self.id) > _HIGH_WATER:
            await self.drain()  # the end of an answer, too: what it holds in memory counts as a request

    def _start(self, message: Message) -> None:
        if self._started:
            raise RuntimeError("The answer has begun already.")
        headers = [*self._wire.default_headers(), *message.get("headers", ())]
        head = answer_head(message["status"], self._asked.method, headers)
        self._started = True
        self._has_body = head.has_body
        self._left = head.length if head.has_body else None
        self.written += len(head.block)
        if head.closes:
            self._wire.leave("draining")
        if head.length is not None or not head.has_body:
            self._head = head.block
        else:  # a stream's first events may be long in coming
            self._http2.send_headers(self.id, head.block)
            self._wire.sent()

    def _body(self, data: bytes, *, more: bool) -> None:
        if self._complete or not self._started:
            raise RuntimeError("The answer is complete, or has not begun.")
        if not self._has_body:
            data = b""
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("The answer is not as long as its content-length.")
        self.written += len(data)
        head, self._head = self._head, b""
        self._complete = not more
        self._drops_rest = not (more or self._ended or self._continue)
        if head and not more and not self._drops_rest:
            whole_answer(self._http2, self.id, head, data)
        else:
            if head:
                self._http2.send_headers(self.id, head)
            self._http2.send_data(self.id, data)
            if not more and not self._drops_rest:
                self._http2.end(self.id)
        self._wire.sent()
        if self._drops_rest:
            self._forget_body()

    def _forget_body(self) -> None:
        self._wire.credit(self.id, sum(map(len, self._pieces)))
        self._pieces.clear()

    def write_body(self, data: bytes) -> bool:
        if self.gone or not self._has_body:
            return True
        self.written += len(data)
        self._http2.send_data(self.id, data)
        self._wire.sent()
        return self._http2.unsent(self.id) <= _HIGH_WATER

    async def drain(self) -> None:
        while not self.gone and self._http2.unsent(self.id) > _HIGH_WATER:
            self._room = self._loop.create_future()
            await self._room

    def watch_client(self, left: Callable[[], None]) -> Callable[[], object]:
        self._client_left = left
        if self.gone:
            self._loop.call_soon(self._tell_client_left)
        return self._stop_watching

    def _stop_watching(self) -> None:
        self._client_left = None

    def _tell_client_left(self) -> None:
        if self._client_left is not None:
            self._client_left()

    def room(self) -> None:
        """Less waits for the client than before."""
        _wake(self._room)


def whole_answer(http2: Http2Connection, stream_id: int, block: bytes, body: bytes) -> None:
    if body:
        http2.answer(stream_id, block, (body,), b"")
    else:
        http2.send_headers(stream_id, block, end=True)


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
