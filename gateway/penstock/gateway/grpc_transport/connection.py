"""A connection: bytes between the socket and the state machine, and the calls of its streams."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import grpc

from penstock.engines.errors import DeadlineExceededError, PenstockError
from penstock.gateway.errors import public_message, wire_shape
from penstock.gateway.front.connection_share import ConnectionShare
from penstock.gateway.front.intake import BodyBudget
from penstock.gateway.front.unread_answers import UnreadAnswers
from penstock.gateway.grpc_transport.answer_fields import end_block, refusal_block, start_block
from penstock.gateway.grpc_transport.call import Call
from penstock.gateway.grpc_transport.call_head import CallHead, Metadata, call_head, is_grpc
from penstock.gateway.grpc_transport.settings import ConnectionSettings
from penstock.gateway.grpc_transport.watch import ConnectionWatch
from penstock.gateway.http2.connection import Http2Connection
from penstock.gateway.http2.errors import ErrorCode
from penstock.gateway.http2.events import (
    ClientLeaving,
    ConnectionFailed,
    DataReceived,
    Event,
    PingAnswered,
    RequestStarted,
    StreamReset,
)
from penstock.gateway.http2.fields import RequestHead
from penstock.gateway.http2.limits import Http2Limits
from penstock.gateway.http2.recent import Recent

_WRITE_BUFFER = 128 << 10
"""Bytes that may wait in the transport before data waits in its streams."""
_AGE_JITTER = 0.1
_LAST_CHANCE_SECONDS = 20.0
"""For a client that does not say whether it knows that no more streams are taken."""
_UNIMPLEMENTED: int = grpc.StatusCode.UNIMPLEMENTED.value[0]
_RESOURCE_EXHAUSTED: int = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
_CALL_BYTES = 4 << 10
"""What a call takes beside its headers and messages, until its handler has ended."""
_SLICE_BYTES = 16 << 10
_SLICE_SECONDS = 0.005
"""What a client has sent at once is looked at in slices; after this time others have their turn."""


class CallDetails(NamedTuple):
    """What a service is asked for a handler with: `grpc.HandlerCallDetails`."""

    method: str
    invocation_metadata: Metadata


FindHandler = Callable[[Any], grpc.RpcMethodHandler | None]


@dataclass(slots=True)
class PortState:
    """What all connections of a port share."""

    settings: ConnectionSettings
    limits: Http2Limits
    find_handler: FindHandler
    """For CallDetails; None: there is no such method."""
    bodies: BodyBudget
    unread: UnreadAnswers
    connections: set[GrpcConnection]
    lost: asyncio.Event
    """Set whenever a connection has ended."""
    stopping: bool = False
    """No calls are taken; connections that were still in their TLS handshake are closed when they are made."""


class GrpcConnection(asyncio.Protocol):
    def __init__(self, port: PortState) -> None:
        self._port = port
        self._settings = port.settings
        self._loop = asyncio.get_running_loop()
        self._http2 = Http2Connection(port.limits, self._loop.time())
        self._calls: dict[int, Call] = {}
        self._lingering: set[Call] = set()
        """Calls whose streams are over and whose handlers have not ended."""
        self._heads: Recent[int, tuple[RequestHead, CallHead]] = Recent()
        """What the last heads mean, by their identity: the state machine gives equal ones as one object."""
        self._share = ConnectionShare(port.bodies)
        self._unlooked = b""
        """Bytes that have come and have not been looked at."""
        self._reading = True
        self._unread = 0
        """Bytes that are noted to wait for the client."""
        self._flushing = False
        """Output is going to be written in this turn of the loop."""
        self._written = 0
        """Bytes, so far."""
        self._closing = False
        """No calls come any more; it is closed when those that run have ended."""
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._timers: list[asyncio.TimerHandle] = []
        self.watch = ConnectionWatch(port.settings, self._loop.time())

    # The socket

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_WRITE_BUFFER)
        self._port.connections.add(self)
        if len(self._port.connections) > self._settings.max_connections and not self._take_place_of_idle_one():
            self._transport.abort()
            return
        age = self._settings.max_age
        if age is not None:
            self._later(age * random.uniform(1 - _AGE_JITTER, 1 + _AGE_JITTER), self._too_old)
        if self._port.stopping:
            self.refuse_calls()
        self._flush()

    def _take_place_of_idle_one(self) -> bool:
        """Closes the connection that has been idle longest, so that idle clients cannot keep others out."""
        others = (other for other in self._port.connections if other is not self and other.replaceable)
        idle = min(others, key=lambda other: other.watch.last_received, default=None)
        if idle is not None:
            idle.abort()
        return idle is not None

    @property
    def replaceable(self) -> bool:
        """Nothing runs, no answer waits for the client's windows, and it is not closed already: one that is closed
        stays in the set until the loop's next turn, and makes room for one connection only."""
        return not (self.busy or self._http2.streams or self._transport.is_closing())

    @property
    def busy(self) -> bool:
        return bool(self._calls or self._lingering)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in self._timers:
            timer.cancel()
        for call in tuple(self._calls.values()):
            call.cancel()
        self._unlooked = b""
        self._http2.abandon()
        self._port.unread.note(self, 0)
        self._port.connections.discard(self)
        self._port.lost.set()

    def pause_writing(self) -> None:
        self._http2.pause()

    def resume_writing(self) -> None:
        self._http2.resume()
        self._read_on()
        self._flush_soon()

    def data_received(self, data: bytes) -> None:
        self.watch.received(self._loop.time())
        if self._unlooked:
            self._unlooked += data
        elif len(data) <= _SLICE_BYTES:
            self._receive(data)
        else:
            self._unlooked = data
            self._look()

    def _look(self) -> None:
        """At what has come, for a while."""
        data, done, begun = self._unlooked, 0, time.monotonic()
        while done < len(data):
            self._receive(data[done : done + _SLICE_BYTES])
            done += _SLICE_BYTES
            if time.monotonic() - begun > _SLICE_SECONDS:
                break
        self._unlooked = data[done:]
        if self._unlooked:
            self._loop.call_soon(self._look)
        self._read_on()

    def _receive(self, data: bytes) -> None:
        for event in self._http2.receive(data, self._loop.time()):
            self._on_event(event)
        if self._http2.has_output:
            self._flush_soon()
        if self._http2.unread:
            self._read_on()

    def _read_on(self) -> None:
        """Or not, while there is enough to look at, or to be read by the client."""
        reading = not (self._unlooked or self._http2.unread)
        if reading != self._reading and not self._transport.is_closing():
            self._reading = reading
            if reading:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()

    def abort(self) -> None:
        self._transport.abort()

    # What the client does

    def _on_event(self, event: Event) -> None:
        if isinstance(event, DataReceived):
            call = self._calls.get(event.stream_id)
            if call is not None:
                call.receive(event.data, ended=event.ended)
        elif isinstance(event, RequestStarted):
            self._on_request(event)
        elif isinstance(event, StreamReset):
            call = self._calls.get(event.stream_id)
            if call is not None:
                call.cancel()
        elif isinstance(event, ConnectionFailed):
            self._fail()
        elif isinstance(event, ClientLeaving):
            self._closing = True
            self._close_if_done()
        else:
            assert isinstance(event, PingAnswered)
            self._close_if_done()

    def _on_request(self, event: RequestStarted) -> None:
        stream_id, head = event.stream_id, event.head
        if head.method != b"POST" or not is_grpc(head):
            self._http2.send_headers(stream_id, refusal_block(405 if head.method != b"POST" else 415), end=True)
            return
        if head.too_large:
            self._refuse(stream_id, _RESOURCE_EXHAUSTED, "received metadata size exceeds limit")
            return
        size = _CALL_BYTES + head.size
        try:
            known = self._call_head(head)
            handler = self._port.find_handler(CallDetails(known.path, known.metadata))
            if handler is not None:
                self._share.take(size)
        except PenstockError as error:
            code: int = getattr(grpc.StatusCode, wire_shape(error).grpc).value[0]
            self._refuse(stream_id, code, public_message(error))
            return
        if handler is None:
            self._refuse(stream_id, _UNIMPLEMENTED, "Method not found!")
            return
        call = Call(self, stream_id, known, size, handler, self._settings, self._share)
        self._calls[stream_id] = call
        call.begin()
        if event.ended:
            call.receive(b"", ended=True)

    def _call_head(self, head: RequestHead) -> CallHead:
        found = self._heads.get(id(head))
        if found is not None:
            return found[1]
        known = call_head(head)
        self._heads.keep(id(head), (head, known), head.size)  # the head lives as long as its identity is used
        return known

    def _refuse(self, stream_id: int, code: int, details: str) -> None:
        self._http2.send_headers(stream_id, start_block("identity") + end_block(code, details, ()), end=True)

    def _fail(self) -> None:
        """The client broke a rule: it is told so, and that is all."""
        for call in tuple(self._calls.values()):
            call.cancel()
        self._http2.resume()
        self._flush()
        self._close()

    # What calls do

    def start(self, stream_id: int, block: bytes) -> None:
        self._http2.send_headers(stream_id, block)
        self._sent()

    def send(self, stream_id: int, data: bytes) -> None:
        self._http2.send_data(stream_id, data)
        self._sent()

    def answer(self, stream_id: int, start: bytes, pieces: tuple[bytes, ...], end: bytes) -> None:
        self._http2.answer(stream_id, start, pieces, end)
        self._sent()

    def end(self, stream_id: int, block: bytes) -> None:
        self._http2.end(stream_id, block)
        self._sent()

    def end_at_once(self, stream_id: int, block: bytes) -> None:
        self._http2.send_headers(stream_id, block, end=True)
        self._sent()

    def _sent(self) -> None:
        self.watch.sent()
        self._flush_soon()

    def unsent(self, stream_id: int) -> int:
        return self._http2.unsent(stream_id)

    def credit(self, stream_id: int, size: int) -> None:
        self._http2.credit(stream_id, size)
        self._flush_soon()

    def expect(self, stream_id: int, size: int) -> None:
        self._http2.expect(stream_id, size)

    def over(self, call: Call) -> None:
        self._calls.pop(call.stream_id, None)
        if call.running:
            self._lingering.add(call)
        else:
            self._lingering.discard(call)
            self._share.give_back(call.size)
        self._http2.unfinished = len(self._lingering)
        if self._closing:
            self._close_if_done()

    # Output

    def _flush_soon(self) -> None:
        """Everything that is queued in this turn of the loop leaves in one write."""
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        if self._transport.is_closing():
            return
        while not self._http2.paused and self._http2.has_output:
            data, relieved = self._http2.take_output()
            self._written += len(data)
            self._transport.write(data)
            for stream_id in relieved:
                call = self._calls.get(stream_id)
                if call is not None:
                    call.room()
        self._note_unread()
        self._close_if_done()

    def _note_unread(self) -> None:
        unread = self._http2.held_bytes + self._transport.get_write_buffer_size()
        if unread != self._unread:
            self._unread = unread
            self._port.unread.note(self, unread)

    @property
    def seconds_to_read(self) -> float:
        return self.watch.seconds_to_read

    # The end

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self._timers.append(self._loop.call_later(seconds, what))

    def _too_old(self) -> None:
        self.leave("max_age")
        if self._settings.max_age_grace is not None:
            self._later(self._settings.max_age_grace, self.abort)

    def leave(self, text: str) -> None:
        """The client is told to open no more calls here; those that run may end."""
        if self._closing:
            return
        self._closing = True
        self._http2.announce_end(text)
        self._later(_LAST_CHANCE_SECONDS, self.refuse_calls)
        self._flush_soon()

    def refuse_calls(self) -> None:
        """New calls are not taken from now on."""
        self._closing = True
        self._http2.close_to_new_streams()
        self._flush_soon()

    def _close_if_done(self) -> None:
        if self._closing and not self.busy and not self._http2.streams:
            told = self._http2.closed_to_new_streams or self._http2.client_left
            if told and not self._http2.has_output:
                self._close()

    def _close(self) -> None:
        """Closing waits until everything is written."""
        if not self._transport.is_closing():
            self._transport.close()
            self._later(self._settings.send_seconds, self.abort)

    def tick(self, now: float) -> None:
        """Once a second: what takes too long."""
        watch, http2 = self.watch, self._http2
        unwritten = self._transport.get_write_buffer_size()
        if watch.late(now, http2, self._written - unwritten, unwritten):
            self.abort()
            return
        self._note_unread()
        for call in tuple(self._calls.values()):
            if call.stalled(now):
                call.fail(DeadlineExceededError("The request took too long to arrive."))
        for stream_id in watch.stalled_streams(now, http2):
            http2.reset(stream_id, ErrorCode.CANCEL)
            if stream_id in self._calls:
                self._calls[stream_id].cancel()
        if watch.wants_ping(now, busy=bool(self._calls)):
            http2.ping(b"are you?")
        if http2.has_output:
            self._flush_soon()
