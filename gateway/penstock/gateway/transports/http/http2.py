"""Connections of HTTP/2 on the HTTP port, and their streams: many requests at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from starlette.types import Message

from penstock.engines.errors import OverloadedError, PenstockError
from penstock.gateway.errors import HttpError
from penstock.gateway.requests.intake import SMALL_BODY
from penstock.gateway.requests.record import QUIET_ROUTES
from penstock.gateway.transports.http.http2_heads import (
    CONTINUE,
    AskedHead,
    answer_head,
    asked_head,
    error_answer,
    grpc_refusal,
)
from penstock.gateway.transports.http.stream import (
    AnswerHead,
    ConnectionLimits,
    Field,
    HttpPort,
    HttpStream,
    connection_scope,
    wake,
)
from penstock.gateway.transports.http2.bounds import Http2Limits, PingRules
from penstock.gateway.transports.http2.connection import Http2Connection
from penstock.gateway.transports.http2.frames import Http2ErrorCode
from penstock.gateway.transports.http2.heads import (
    DataReceived,
    Recent,
    RequestHead,
    RequestStarted,
    StreamEvent,
    is_grpc,
)
from penstock.gateway.transports.sockets.connection import SocketSettings
from penstock.gateway.transports.sockets.http2 import Http2SocketConnection

_FIELD_OVERHEAD = 32
_REQUEST_BYTES = 4 << 10
"""What a request takes beside its head and body, until its handler has ended."""
_LONG_BODY = 64 << 10
_MAX_WINDOW = 4 << 20
"""Of a long body so much may be on its way at a time."""
_FOR_PROBES = 64
"""Requests beyond the limit, for those who ask whether the server is well: a full server is. Over HTTP/1.1, too, a
connection that is there gets its answer."""
_GRPC_REFUSAL = grpc_refusal(b"This port serves HTTP; gRPC has a port of its own (--grpc-port)")
_HIGH_WATER = 32 << 10
"""Bytes of a stream that wait for the client before its writer has to wait, too. The state machine tells when less than
this is left."""
_BYTES_OF_FRAME = 256
"""A body may come in so small pieces on average, beside the number of chunks that is allowed."""


class Http2Stream(HttpStream):
    _read = _frames = 0

    def __init__(
        self, connection: MultiplexedConnection, port: HttpPort, stream_id: int, http_head: AskedHead, size: int
    ) -> None:
        """`size` is what the connection's share has been asked for already."""
        super().__init__(port, http_head.method, expects_continue=http_head.expects_continue)
        self.id = stream_id
        self._connection = connection
        self._http2 = connection.http2
        self._content_length = http_head.content_length
        self._held = size
        """Bytes that count in the connection's share."""

    def over(self) -> None:
        self._connection.share.give_back(self._held)
        self._connection.over(self)

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
        self._connection.sent()

    # The request

    def feed(self, data: bytes, *, ended: bool) -> None:
        """A piece of the body."""
        self._ended = ended
        if self._drops_rest:
            self._connection.credit(self.id, len(data))
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
            self._connection.share.take(len(data))
            self._held += len(data)
            self._pieces.append(data)

    def took(self, size: int) -> None:
        beyond = size - max(0, min(size, SMALL_BODY - self._read))
        self._read += size
        self._connection.share.give_back(beyond)  # the app counts it once it reads that much
        self._held -= beyond
        if not self._ended:
            self._connection.credit(self.id, size)

    def wants_body(self) -> None:
        if self._continue and not self.started:
            self._continue = False
            if not self._received:
                self._http2.send_headers(self.id, CONTINUE)
                self._connection.sent()
        if self._content_length is not None:
            self._connection.expect(self.id, self._content_length - self._received)

    def disconnect(self) -> None:
        if not self.gone:
            self._connection.given_up()
            super().disconnect()

    def refuse(self, error: PenstockError) -> None:
        if self.started:
            self._http2.reset(self.id, Http2ErrorCode.INTERNAL_ERROR)
        else:
            block, body = error_answer(error, self.method, self._port.date)
            whole_answer(self._http2, self.id, block, body)
        self._connection.sent()
        self.disconnect()

    # The answer

    async def send(self, message: Message) -> None:
        await super().send(message)
        if self.full:
            await self.drain()  # the end of an answer, too: what it holds in memory counts as a request

    def answer_head(self, status: int, headers: Iterable[Field]) -> AnswerHead:
        head, closes = answer_head(status, self.method, [(b"date", self._port.date), *headers])
        if closes:
            self._connection.leave("draining")
        return head

    def write_head(self, block: bytes) -> None:
        self._http2.send_headers(self.id, block)
        self._connection.sent()

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
        self._connection.sent()
        if self._drops_rest:
            self._connection.credit(self.id, sum(map(len, self._pieces)))
            self._pieces.clear()

    @property
    def full(self) -> bool:
        return self._http2.unsent(self.id) > _HIGH_WATER

    def write_body(self, data: bytes) -> bool:
        if self.gone or not self._has_body:
            return True
        self.written += len(data)
        self._http2.send_data(self.id, data)
        self._connection.sent()
        return not self.full


def whole_answer(http2: Http2Connection, stream_id: int, block: bytes, body: bytes) -> None:
    if body:
        http2.answer(stream_id, block, (body,), b"")
    else:
        http2.send_headers(stream_id, block, end=True)


def socket_settings(limits: ConnectionLimits) -> SocketSettings:
    return SocketSettings(
        start_seconds=limits.header_timeout,
        frame_seconds=limits.header_timeout,
        send_seconds=limits.send_timeout,
        stream_seconds=limits.send_timeout,
    )


def http2_limits(limits: ConnectionLimits) -> Http2Limits:
    return Http2Limits(
        max_streams=limits.max_streams,
        max_header_list_bytes=limits.max_header_bytes + limits.max_uri_bytes + _FIELD_OVERHEAD * limits.max_headers,
        pings=PingRules(max_strikes=0),  # browsers and proxies ping as they like; frames without use are counted
    )


class MultiplexedConnection(Http2SocketConnection):
    def __init__(self, port: HttpPort) -> None:
        super().__init__(port)
        self._port = port
        self._streams: dict[int, Http2Stream] = {}
        """Those whose handlers run."""
        self._heads: Recent[int, tuple[RequestHead, AskedHead]] = Recent()
        """What the last heads mean, by their identity: the state machine gives equal ones as one object."""
        self._idle_since = self._loop.time()
        self._scope: dict[str, Any] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._scope = connection_scope(transport, "2")
        super().connection_made(transport)

    # What the client does

    def on_stream_event(self, event: StreamEvent) -> None:
        if isinstance(event, RequestStarted):
            self._on_request(event)
            return
        stream = self._streams.get(event.stream_id)
        if stream is None:
            return
        if isinstance(event, DataReceived):
            if not stream.gone:
                stream.feed(event.data, ended=event.ended)
        else:
            stream.disconnect()

    def _on_request(self, event: RequestStarted) -> None:
        head = event.head
        if is_grpc(head):
            self.http2.send_headers(event.stream_id, _GRPC_REFUSAL, end=True)
            return
        size = _REQUEST_BYTES + head.size
        try:
            http_head = self._http_head(head)
            beyond = len(self._port.running) - self._port.http_limits.max_connections
            if beyond >= 0 and (beyond >= _FOR_PROBES or http_head.path not in QUIET_ROUTES):
                raise OverloadedError("Too many requests at a time.", retry_after=1)
            self.share.take(size)
        except PenstockError as error:
            block, body = error_answer(error, head.method.decode("ascii"), self._port.date)
            whole_answer(self.http2, event.stream_id, block, body)
            return
        stream = Http2Stream(self, self._port, event.stream_id, http_head, size)
        if event.ended:
            stream.feed(b"", ended=True)
        self._streams[event.stream_id] = stream
        scope = {
            **self._scope,
            "method": http_head.method,
            "path": http_head.path,
            "raw_path": http_head.raw_path,
            "query_string": http_head.query,
            "headers": http_head.headers,
            "state": {},
        }
        stream.start(scope)

    def _http_head(self, head: RequestHead) -> AskedHead:
        """Raises PenstockError."""
        remembered = self._heads.get(id(head))
        if remembered is not None:
            return remembered[1]
        http_head = asked_head(head, self._port.http_limits)
        self._heads.keep(id(head), (head, http_head), head.size)  # the head lives as long as its identity is used
        return http_head

    def end_requests(self) -> None:
        for stream in tuple(self._streams.values()):
            stream.disconnect()

    # What streams do

    def expect(self, stream_id: int, size: int) -> None:
        """So many more bytes of the stream's body are going to be read at once."""
        if size > _LONG_BODY:
            self.http2.expect(stream_id, min(size, _MAX_WINDOW))
            self._flush_soon()

    def given_up(self) -> None:
        """A stream is over whose handler runs on."""
        self.http2.unfinished += 1

    def over(self, stream: Http2Stream) -> None:
        """Its handler has ended."""
        self.http2.unfinished -= stream.gone
        del self._streams[stream.id]
        self._idle_since = self._loop.time()
        self.request_over()

    # The owner

    @property
    def busy(self) -> bool:
        return bool(self._streams)

    @property
    def idle_since(self) -> float:
        return self._idle_since

    def relieved(self, stream_id: int) -> None:
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.room()

    def look_at_requests(self, now: float) -> None:
        for stream in tuple(self._streams.values()):
            if not stream.gone and stream.late(now):
                stream.refuse(HttpError(408, "The request took too long to arrive.", code="request_timeout"))
        if self.busy or self.http2.streams:
            self._idle_since = now
        elif now - self._idle_since > self._port.http_limits.keep_alive_timeout:
            self.refuse_requests()
