"""A connection of HTTP/2 on the HTTP port: many requests at a time."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.engines.errors import OverloadedError, PenstockError
from penstock.gateway.errors import HttpError
from penstock.gateway.front.record import QUIET_ROUTES
from penstock.gateway.http.http2_heads import AskedHead, asked_head, error_answer, grpc_refusal, is_grpc
from penstock.gateway.http.http2_stream import Http2Stream, whole_answer
from penstock.gateway.http.limits import ConnectionLimits
from penstock.gateway.http.stream import HttpPort, connection_scope
from penstock.gateway.http2.bounds import Http2Limits, PingRules
from penstock.gateway.http2.heads import DataReceived, Recent, RequestHead, RequestStarted, StreamEvent
from penstock.gateway.http2_sockets.connection import Http2SocketConnection
from penstock.gateway.http2_sockets.settings import SocketSettings

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
            asked = self._asked(head)
            beyond = len(self._port.running) - self._port.http_limits.max_connections
            if beyond >= 0 and (beyond >= _FOR_PROBES or asked.path not in QUIET_ROUTES):
                raise OverloadedError("Too many requests at a time.", retry_after=1)
            self.share.take(size)
        except PenstockError as error:
            block, body = error_answer(error, head.method.decode("ascii"), self._port.date)
            whole_answer(self.http2, event.stream_id, block, body)
            return
        stream = Http2Stream(self, self._port, event.stream_id, asked, size)
        if event.ended:
            stream.feed(b"", ended=True)
        self._streams[event.stream_id] = stream
        scope = {
            **self._scope,
            "method": asked.method,
            "path": asked.path,
            "raw_path": asked.raw_path,
            "query_string": asked.query,
            "headers": asked.headers,
            "state": {},
        }
        stream.start(scope)

    def _asked(self, head: RequestHead) -> AskedHead:
        """Raises PenstockError."""
        remembered = self._heads.get(id(head))
        if remembered is not None:
            return remembered[1]
        asked = asked_head(head, self._port.http_limits)
        self._heads.keep(id(head), (head, asked), head.size)  # the head lives as long as its identity is used
        return asked

    def end_requests(self) -> None:
        for stream in tuple(self._streams.values()):
            stream.disconnect()

    # What streams do

    def expect(self, stream_id: int, size: int) -> None:
        if size > _LONG_BODY:
            self.http2.expect(stream_id, min(size, _MAX_WINDOW))
            self._flush_soon()

    def given_up(self) -> None:
        self.http2.unfinished += 1

    def over(self, stream: Http2Stream) -> None:
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
