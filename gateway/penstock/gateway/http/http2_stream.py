"""One request and its answer on a stream of HTTP/2."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from starlette.types import Message

from penstock.engines.errors import PenstockError
from penstock.gateway.errors import HttpError
from penstock.gateway.front.connection_share import ConnectionShare
from penstock.gateway.front.intake import SMALL_BODY
from penstock.gateway.http.http2_heads import CONTINUE, AskedHead, answer_head, error_answer
from penstock.gateway.http.stream import AnswerHead, Field, HttpPort, HttpStream, wake
from penstock.gateway.http2.connection import Http2Connection
from penstock.gateway.http2.frames import ErrorCode

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

    def over(self, stream: Http2Stream) -> None:
        """The handler has ended."""


class Http2Stream(HttpStream):
    _read = _frames = 0

    def __init__(self, wire: Wire, port: HttpPort, stream_id: int, asked: AskedHead, size: int) -> None:
        """`size` is what the connection's share has been asked for already."""
        super().__init__(port, asked.method, expects_continue=asked.expects_continue)
        self.id = stream_id
        self._wire = wire
        self._http2 = wire.http2
        self._content_length = asked.content_length
        self._held = size
        """Bytes that count in the connection's share."""

    def over(self) -> None:
        self._wire.share.give_back(self._held)
        self._wire.over(self)

    async def drop_rest(self) -> None:
        """It is read and dropped for a while, since clients that are still sending, curl and httpx for two, show no
        answer when their stream is reset."""
        try:
            async with asyncio.timeout(self._port.http_limits.body_idle_timeout):
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
            wake(self._more)
            return
        self._received += len(data)
        self._frames += 1
        try:
            self._keep(data)
        except PenstockError as error:
            self.refuse(error)
        else:
            wake(self._more)

    def _keep(self, data: bytes) -> None:
        if self._frames > self._port.http_limits.max_chunks + self._received // _BYTES_OF_FRAME:
            raise HttpError(400, "The request body has too many chunks.", code="too_many_chunks")
        if data:
            self._wire.share.take(len(data))
            self._held += len(data)
            self._pieces.append(data)

    def took(self, size: int) -> None:
        beyond = size - max(0, min(size, SMALL_BODY - self._read))
        self._read += size
        self._wire.share.give_back(beyond)  # the app counts it once it reads that much
        self._held -= beyond
        if not self._ended:
            self._wire.credit(self.id, size)

    def wants_body(self) -> None:
        if self._continue and not self.started:
            self._continue = False
            if not self._received:
                self._http2.send_headers(self.id, CONTINUE)
                self._wire.sent()
        if self._content_length is not None:
            self._wire.expect(self.id, self._content_length - self._received)

    def disconnect(self) -> None:
        if not self.gone:
            self._wire.given_up()
            super().disconnect()

    def refuse(self, error: PenstockError) -> None:
        if self.started:
            self._http2.reset(self.id, ErrorCode.INTERNAL_ERROR)
        else:
            block, body = error_answer(error, self.method, self._port.date)
            whole_answer(self._http2, self.id, block, body)
        self._wire.sent()
        self.disconnect()

    # The answer

    async def send(self, message: Message) -> None:
        await super().send(message)
        if self.full:
            await self.drain()  # the end of an answer, too: what it holds in memory counts as a request

    def answer_head(self, status: int, headers: Iterable[Field]) -> AnswerHead:
        head, closes = answer_head(status, self.method, [(b"date", self._port.date), *headers])
        if closes:
            self._wire.leave("draining")
        return head

    def write_head(self, block: bytes) -> None:
        self._http2.send_headers(self.id, block)
        self._wire.sent()

    def write(self, head: bytes, data: bytes) -> None:
        self.written += len(data)
        self._drops_rest = self.complete and not (self._ended or self._continue)
        if head and self.complete and not self._drops_rest:
            whole_answer(self._http2, self.id, head, data)
        else:
            if head:
                self._http2.send_headers(self.id, head)
            self._http2.send_data(self.id, data)
            if self.complete and not self._drops_rest:
                self._http2.end(self.id)
        self._wire.sent()
        if self._drops_rest:
            self._wire.credit(self.id, sum(map(len, self._pieces)))
            self._pieces.clear()

    @property
    def full(self) -> bool:
        return self._http2.unsent(self.id) > _HIGH_WATER

    def write_body(self, data: bytes) -> bool:
        if self.gone or not self._has_body:
            return True
        self.written += len(data)
        self._http2.send_data(self.id, data)
        self._wire.sent()
        return not self.full


def whole_answer(http2: Http2Connection, stream_id: int, block: bytes, body: bytes) -> None:
    if body:
        http2.answer(stream_id, block, (body,), b"")
    else:
        http2.send_headers(stream_id, block, end=True)
