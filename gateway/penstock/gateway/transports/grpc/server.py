"""The port of gRPC: its connections, with the calls of their streams, and their listening side."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc

from penstock.engines.errors import DeadlineExceededError, PenstockError
from penstock.gateway.errors import public_message, wire_shape
from penstock.gateway.requests.acceptor import Acceptor
from penstock.gateway.requests.connections import PortConnections
from penstock.gateway.requests.intake import BodyBudget, UnreadAnswers
from penstock.gateway.requests.tls import TlsSettings
from penstock.gateway.transports.grpc.call import ConnectionSettings, GrpcCall
from penstock.gateway.transports.grpc.heads import CallHead, Metadata, call_head, end_block, refusal_block, start_block
from penstock.gateway.transports.http2.bounds import Http2Limits
from penstock.gateway.transports.http2.heads import (
    DataReceived,
    Recent,
    RequestHead,
    RequestStarted,
    StreamEvent,
    is_grpc,
)
from penstock.gateway.transports.sockets.connection import SocketPort, watch
from penstock.gateway.transports.sockets.http2 import Http2SocketConnection

_UNIMPLEMENTED: int = grpc.StatusCode.UNIMPLEMENTED.value[0]
_RESOURCE_EXHAUSTED: int = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
_CALL_BYTES = 4 << 10
"""What a call takes beside its headers and messages, until its handler has ended."""


class CallDetails(NamedTuple):
    """What a service is asked for a handler with: `grpc.HandlerCallDetails`."""

    method: str
    invocation_metadata: Metadata


FindHandler = Callable[[Any], grpc.RpcMethodHandler | None]


@dataclass(slots=True, kw_only=True)
class GrpcPort(SocketPort):
    settings: ConnectionSettings
    find_handler: FindHandler
    """For CallDetails; None: there is no such method."""
    leaving: bool = False
    """Connections that are made now are asked to end, too: their TLS handshakes began before."""


class GrpcConnection(Http2SocketConnection):
    def __init__(self, port: GrpcPort) -> None:
        super().__init__(port)
        self._port = port
        self._calls: dict[int, GrpcCall] = {}
        self._lingering: set[GrpcCall] = set()
        """Calls whose streams are over and whose handlers have not ended."""
        self._heads: Recent[int, tuple[RequestHead, CallHead]] = Recent()
        """What the last heads mean, by their identity: the state machine gives equal ones as one object."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._port.leaving:
            self.leave("draining")

    @property
    def busy(self) -> bool:
        return bool(self._calls or self._lingering)

    @property
    def begins_no_more(self) -> bool:
        """The client knows that it can make no more calls here, and handlers have those that it made."""
        return self.left and all(call.begun for call in self._calls.values())

    # What the client does

    def on_stream_event(self, event: StreamEvent) -> None:
        if isinstance(event, RequestStarted):
            self._on_request(event)
            return
        call = self._calls.get(event.stream_id)
        if call is None:
            return
        if isinstance(event, DataReceived):
            call.receive(event.data, ended=event.ended)
        else:
            call.cancel()

    def _on_request(self, event: RequestStarted) -> None:
        stream_id, head = event.stream_id, event.head
        entry = self._heads.get(id(head))
        if entry is None and self._is_refused(stream_id, head):
            return
        size = _CALL_BYTES + head.size
        try:
            known = self._call_head(head) if entry is None else entry[1]
            handler = self._port.find_handler(CallDetails(known.path, known.metadata))
            if handler is not None:
                self.share.take(size)
        except PenstockError as error:
            code: int = getattr(grpc.StatusCode, wire_shape(error).grpc).value[0]
            self._refuse(stream_id, code, public_message(error))
            return
        if handler is None:
            self._refuse(stream_id, _UNIMPLEMENTED, "Method not found!")
            return
        call = GrpcCall(self, stream_id, known, size, handler, self._port.settings, self.share)
        self._calls[stream_id] = call
        call.begin()
        if event.ended:
            call.receive(b"", ended=True)

    def _is_refused(self, stream_id: int, head: RequestHead) -> bool:
        """What is no call, or too large a one, is answered so."""
        if head.method != b"POST" or not is_grpc(head):
            self.http2.send_headers(stream_id, refusal_block(405 if head.method != b"POST" else 415), end=True)
            return True
        if head.too_large:
            self._refuse(stream_id, _RESOURCE_EXHAUSTED, "received metadata size exceeds limit")
            return True
        return False

    def _call_head(self, head: RequestHead) -> CallHead:
        known = call_head(head)
        self._heads.keep(id(head), (head, known), head.size)  # the head lives as long as its identity is used
        return known

    def _refuse(self, stream_id: int, code: int, details: str) -> None:
        self.http2.send_headers(stream_id, start_block("identity") + end_block(code, details, ()), end=True)

    def end_requests(self) -> None:
        for call in tuple(self._calls.values()):
            call.cancel()

    def look_at_requests(self, now: float) -> None:
        for call in tuple(self._calls.values()):
            if call.stalled(now):
                call.fail(DeadlineExceededError("The request took too long to arrive."))

    def relieved(self, stream_id: int) -> None:
        call = self._calls.get(stream_id)
        if call is not None:
            call.room()

    # What calls do

    def start(self, stream_id: int, block: bytes) -> None:
        self.http2.send_headers(stream_id, block)
        self.sent()

    def send(self, stream_id: int, data: bytes) -> None:
        self.http2.send_data(stream_id, data)
        self.sent()

    def answer(self, stream_id: int, start: bytes, pieces: tuple[bytes, ...], end: bytes) -> None:
        self.http2.answer(stream_id, start, pieces, end)
        self.sent()

    def end(self, stream_id: int, block: bytes) -> None:
        self.http2.end(stream_id, block)
        self.sent()

    def end_at_once(self, stream_id: int, block: bytes) -> None:
        self.http2.send_headers(stream_id, block, end=True)
        self.sent()

    def unsent(self, stream_id: int) -> int:
        return self.http2.unsent(stream_id)

    def expect(self, stream_id: int, size: int) -> None:
        self.http2.expect(stream_id, size)

    def over(self, call: GrpcCall) -> None:
        self._calls.pop(call.stream_id, None)
        if call.running:
            self._lingering.add(call)
        else:
            self._lingering.discard(call)
            self.share.give_back(call.size)
        self.http2.unfinished = len(self._lingering)
        self.request_over()


_BACKLOG = 2048
_TICK_SECONDS = 1.0
_LEAVE_SECONDS = 1.0
"""For clients to see that the port closes."""


class Http2Transport:
    """Serves from `start` to `stop`. Made and used on the event loop."""

    def __init__(
        self,
        host: str,
        port: int,
        tls: TlsSettings,
        settings: ConnectionSettings,
        limits: Http2Limits,
        find_handler: FindHandler,
        bodies: BodyBudget,
        unread: UnreadAnswers,
        listener: socket.socket | None = None,
    ) -> None:
        """Binds, unless it is given a socket that listens already. Raises OSError, ConfigError."""
        self._connections = PortConnections(settings.max_connections)
        self._grpc = GrpcPort(
            settings=settings,
            limits=limits,
            connections=self._connections,
            bodies=bodies,
            unread=unread,
            find_handler=find_handler,
        )
        self._acceptor = Acceptor(tls, lambda: GrpcConnection(self._grpc), settings.start_seconds, _BACKLOG)
        self.port = self._acceptor.bind(host, port) if listener is None else self._acceptor.take(listener)
        self._ticker: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._acceptor.start()
        self._ticker = asyncio.create_task(self._tick())

    def reload_certificates(self) -> None:
        """For new connections; does nothing without TLS."""
        self._acceptor.reload_certificates()

    def drain(self) -> None:
        """Clients are told to open other connections for further calls; calls that run may end."""
        for connection in self._connections:
            if isinstance(connection, GrpcConnection):
                connection.leave("draining")

    async def leave(self, seconds: float = _LEAVE_SECONDS) -> None:
        """Takes no more connections, and tells all clients to open others. Calls that they make before they know are
        served: proxies may have no way to send them elsewhere. Returns when all know, at most after so many seconds."""
        self._grpc.leaving = True
        self.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._acceptor.refuse()
                await self._connections.until(self._begin_no_more)

    def _begin_no_more(self) -> bool:
        return all(
            connection.begins_no_more for connection in self._connections if isinstance(connection, GrpcConnection)
        )

    def refuse(self) -> None:
        """Takes no more calls; those that run may end."""
        self._connections.refuse()

    async def stop(self, grace: float) -> None:
        """Takes no more calls; those that run get so many seconds."""
        self._acceptor.close()
        await self._connections.stop(grace)
        if self._ticker is not None:
            self._ticker.cancel()

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            watch(self._connections, loop.time())
