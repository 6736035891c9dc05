"""uvicorn's httptools protocol with the limits that it lacks.

By itself it takes headers of any size and number, waits for ever for a slow sender or reader, queues pipelined requests
(and then no longer notices that their client leaves), and answers broken requests in plain text. See ConnectionLimits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any, cast

import httptools
from starlette.types import Message
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from penstock.engines.errors import InvalidRequestError, OverloadedError, PenstockError
from penstock.gateway.errors import HttpError, error_headers, error_json, wire_shape
from penstock.gateway.front.port_connections import PortConnections
from penstock.gateway.http.body_pace import BodyPace
from penstock.gateway.http.exchange import ARRIVAL_KEY, SENDER_KEY
from penstock.gateway.http.limits import ConnectionLimits
from penstock.gateway.http.refused_upgrade import BodyOnly, framing
from penstock.gateway.http.response_sender import MAX_UNSENT_BYTES, ResponseSender
from penstock.gateway.http.unsent_watch import UnsentWatch
from penstock.gateway.http2.frames import PREFACE
from penstock.gateway.http2_sockets.connection import SocketConnection

_LINGER_SECONDS = 1.0
_LITTLE_UNSENT = 16 << 10
"""Bytes of an answer that has ended. So few are sent at once, or watched from the end of the keep-alive on: a timer for
each small answer would cost more than writing it."""
_HTTP2_START = PREFACE[:3]
"""No method of HTTP/1.1 begins so."""


class _Phase(Enum):
    """What the client has to send next. HEADERS also stands for the pause between requests."""

    HEADERS = auto()
    BODY = auto()


class _Pipelined(Exception):
    """A second request came before the first was answered."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection. A request over a limit is answered here, and the connection closed; its handler, if it runs
    already, sees `http.disconnect`."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        limits: ConnectionLimits,
        port_connections: PortConnections,
        new_http2: Callable[[], SocketConnection] | None = None,
    ) -> None:
        """`new_http2` makes what takes over from here where the client speaks HTTP/2; None: that is not offered."""
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._port_connections = port_connections
        self._new_http2 = new_http2
        self._first_bytes: bytes | None = None if new_http2 is None else b""
        """What has come of the three that say whether this is HTTP/2; None: it is known."""
        self._deaf = False
        """Nothing more is read from this client."""
        self._closes_after_body = False
        """The answer was sent before the end of the body, and is the last one."""
        self._pipelined = False
        self._framing = b""
        """Headers that say how long the body is, of a request that asks for another protocol."""
        self._phase = _Phase.HEADERS
        self._overhead = 0
        """Bytes received since the last piece of body: header lines, trailers, chunk extensions."""
        self._header_bytes = 0
        self._headers_seen = 0
        self._chunks = 0
        self._pace = BodyPace(limits)
        self._receive_timer: asyncio.TimerHandle | None = None
        self._unsent_watch: UnsentWatch
        self._sender: ResponseSender | None = None
        """Of the last request."""
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        has_room = self._port_connections.add(self)  # uvicorn counts connections, too, but has no limit
        super().connection_made(transport)
        self._unsent_watch = UnsentWatch(transport, self.loop, self._limits.send_timeout)
        transport.set_write_buffer_limits(high=MAX_UNSENT_BYTES)
        self._arm_receive(self._limits.header_timeout, self._headers_late)
        self.idle_since = time.monotonic()  # finer than the loop's clock
        if self._new_http2 is not None and _negotiated_http2(transport):
            if has_room:
                self._hand_over(self._new_http2(), b"")
            else:
                transport.abort()  # it would not understand an answer of HTTP/1.1
        elif not has_room:
            self._refuse(OverloadedError("Too many connections."))

    @property
    def replaceable(self) -> bool:
        """Before its first request, or between two."""
        answered = self.cycle is None or self.cycle.response_complete
        waits = self._phase is _Phase.HEADERS and not self._overhead and not self._deaf
        return answered and waits and not self.transport.is_closing()

    def abort(self) -> None:
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        super().connection_lost(exc)
        if self._sender is not None:
            self._sender.client_left()
        self._port_connections.remove(self)
        # They lead back here: no connection leaves a cycle.
        self.cycle = self.scope = self._sender = None  # type: ignore[assignment]

    def _stop_timers(self) -> None:
        self._deaf = True
        self._disarm_receive()
        self._unsent_watch.stop()

    # HTTP/2

    def _told_apart(self, data: bytes) -> bytes:
        """What has come so far, once it is known to be HTTP/1.1. Empty while that is not known, and where HTTP/2 was
        handed over."""
        assert self._first_bytes is not None
        data = self._first_bytes + data
        self._first_bytes = None
        if data[:3] == _HTTP2_START[: len(data)]:
            if len(data) < len(_HTTP2_START):
                self._first_bytes = data
            elif self._new_http2 is not None:
                self._hand_over(self._new_http2(), data)
            return b""
        return data

    def _hand_over(self, taker: SocketConnection, data: bytes) -> None:
        self._stop_timers()
        self.parser = None  # type: ignore[assignment]  # it knows this object
        self._port_connections.replace(self, taker)
        self.transport.set_protocol(taker)
        taker.connection_made(self.transport)
        if data:
            taker.data_received(data)

    # Receiving

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if self._first_bytes is not None:
            data = self._told_apart(data)
            if not data:
                return
        self._unset_keepalive_if_required()
        self._overhead += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._parser_failed(error)
        else:
            if self._overhead > self._limits.max_header_bytes + self._limits.max_uri_bytes:
                self._refuse(_headers_too_large())
            elif self._receive_timer is None and not self._deaf:
                self._wait_for_rest()

    def _wait_for_rest(self) -> None:
        """Sets the timer of a request that has not come as a whole, as most do."""
        if self._phase is _Phase.BODY:
            self._arm_receive(self._limits.body_idle_timeout, self._body_idle)
        elif self._overhead:
            self._arm_receive(self._limits.header_timeout, self._headers_late)

    def _feed(self, data: bytes) -> None:
        """A request that asks for another protocol is answered as if it had not; what follows it is not HTTP. Clients
        of Java and curl ask for HTTP/2 in this way, and send a body, which httptools leaves to us."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._framing:
                self.parser = httptools.HttpRequestParser(BodyOnly(self))
                self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % self._framing)
                self.parser.feed_data(data[upgrade.args[0] :])
            else:
                self._hang_up_after_response()

    def _parser_failed(self, error: httptools.HttpParserError) -> None:
        cause = error.__context__  # httptools wraps what its callbacks raise
        if isinstance(cause, _Pipelined):
            self._hang_up_after_response()
        elif isinstance(cause, HttpError):
            self._refuse(cause)
        else:
            self._refuse(InvalidRequestError("Invalid HTTP request."))

    def on_message_begin(self) -> None:
        self._pipelined = self.cycle is not None and (self._closes_after_body or not self.cycle.response_complete)
        super().on_message_begin()
        self.scope[ARRIVAL_KEY] = time.monotonic()  # type: ignore[literal-required]
        self._header_bytes = self._headers_seen = self._chunks = 0

    def on_url(self, url: bytes) -> None:
        if self._pipelined:  # an exception in on_message_begin would be lost in httptools
            raise _Pipelined
        super().on_url(url)
        if len(self.url) > self._limits.max_uri_bytes:
            raise HttpError(414, "The URI is too long.", code="uri_too_long")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers_seen += 1
        self._header_bytes += len(name) + len(value)
        limits = self._limits
        if self._headers_seen > limits.max_headers or self._header_bytes > limits.max_header_bytes:
            raise _headers_too_large()
        if self._phase is _Phase.HEADERS:  # trailers are counted and dropped: the request is already being handled
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._framing = framing(self.headers) if self.parser.should_upgrade() else b""
        self._phase = _Phase.BODY
        self._overhead = 0
        self._pace.begin(self.loop.time())
        self._disarm_receive()
        if not self.flow.write_paused:
            self._unsent_watch.stop()  # the next answer may be longer than the rest of the last one, and yet be read
        super().on_headers_complete()
        if self.cycle is not None:
            current = self.scope["http_version"] == "1.1"
            sender = ResponseSender(self.transport, self.loop, self.flow, self._close_answered, chunked=current)
            self._sender = sender
            self.cycle.transport = cast("asyncio.Transport", sender)
            self.scope[SENDER_KEY] = sender  # type: ignore[literal-required]
            if not current:
                _answer_until_close(self.cycle)

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > self._limits.max_chunks:
            raise HttpError(400, "The request body has too many chunks.", code="too_many_chunks")

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        self._pace.received(self.loop.time(), len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._framing and self.parser.should_upgrade():
            return  # the body comes yet
        self._phase = _Phase.HEADERS
        self._overhead = 0
        self._disarm_receive()
        super().on_message_complete()
        if self._framing:
            self._hang_up_after_response()
        if self.cycle is not None and self.cycle.response_complete:  # its answer was there before its end
            self._rest_dropped()

    def _rest_dropped(self) -> None:
        if self._closes_after_body:
            self._deaf = True
            self.transport.close()
        else:
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self._limits.keep_alive_timeout, self.timeout_keep_alive_handler
            )

    def _headers_late(self) -> None:
        self._refuse(_too_slow())

    def _body_idle(self) -> None:
        """Fires when the body may be too slow. Waits on while the server itself does not read."""
        now = self.loop.time()
        if self.flow.read_paused:
            self._pace.not_read(now)
        seconds = self._pace.seconds_left(now)
        if seconds:
            self._arm_receive(seconds, self._body_idle)
        else:
            self._refuse(_too_slow())

    def _arm_receive(self, seconds: float, late: Callable[[], None]) -> None:
        self._disarm_receive()
        self._receive_timer = self.loop.call_later(seconds, late)

    def _disarm_receive(self) -> None:
        if self._receive_timer is not None:
            self._receive_timer.cancel()
            self._receive_timer = None

    # Refusing

    def _hang_up_after_response(self) -> None:
        """No pipelining: what comes behind the request that is being answered is dropped. Clients send it again."""
        self._deaf = True
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def _refuse(self, error: PenstockError) -> None:
        """Answers in place of the handler, unless that has begun to answer, and closes."""
        self._deaf = True
        self._disarm_receive()
        if self.transport.is_closing():
            return
        if self._phase is _Phase.BODY and self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.close()
                self._end_soon()
                return
        self.transport.write(_response(error))
        if self.transport.can_write_eof():
            # Closing at once would reset the connection while the client still sends, which would lose the answer.
            self.transport.write_eof()
            self._receive_timer = self.loop.call_later(_LINGER_SECONDS, self.transport.close)
        else:
            self.transport.close()
            self._end_soon()

    # Closing

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._end_soon()

    def shutdown(self) -> None:
        super().shutdown()
        if self.transport.is_closing():
            self._end_soon()

    def _close_answered(self) -> None:
        """The last answer is sent. While the client still sends its body, closing would reset the connection, and the
        client would lose the answer. TLS reads on by itself."""
        sends = self._phase is _Phase.BODY and self.cycle is not None and self.cycle.response_complete
        if sends and self.transport.can_write_eof() and not self.transport.is_closing():
            self._closes_after_body = True
            self.transport.write_eof()
        else:
            self.transport.close()

    def _end_soon(self) -> None:
        """A TLS connection that closes waits for the client to agree, and an idle client does not even read."""
        if self.transport.get_write_buffer_size():
            self._unsent_watch.start()
        else:
            self._arm_receive(_LINGER_SECONDS, self.transport.abort)

    # Sending

    def on_response_complete(self) -> None:
        self.idle_since = time.monotonic()
        if self.transport.get_write_buffer_size() > _LITTLE_UNSENT or self.transport.is_closing():
            self._unsent_watch.start()
        if self._phase is _Phase.BODY:
            # Refused before its end: the rest is read and dropped for a while, so that the answer arrives.
            self._arm_receive(self._limits.body_idle_timeout, self.transport.close)
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unsent_watch.start()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unsent_watch.stop()


def _negotiated_http2(transport: asyncio.Transport) -> bool:
    tls = transport.get_extra_info("ssl_object")
    return tls is not None and tls.selected_alpn_protocol() == "h2"


def _answer_until_close(cycle: RequestResponseCycle) -> None:
    """For clients before HTTP/1.1, which know neither chunks nor 100 Continue: an answer ends with its length or with
    the connection."""
    cycle.keep_alive = False
    cycle.chunked_encoding = False
    cycle.waiting_for_100_continue = False
    cycle.send = partial(_send_as_it_is, cycle)  # type: ignore[method-assign]


async def _send_as_it_is(cycle: RequestResponseCycle, message: Message) -> None:
    """Lets no length be too long or too short; the first message, the head, has none."""
    cycle.expected_content_length = len(message.get("body", b""))
    await RequestResponseCycle.send(cycle, message)  # type: ignore[arg-type]


def _headers_too_large() -> HttpError:
    return HttpError(431, "The request's headers are too large.", code="headers_too_large")


def _too_slow() -> HttpError:
    return HttpError(408, "The request took too long to arrive.", code="request_timeout")


def _response(error: PenstockError) -> bytes:
    body = error_json(error)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *error_headers(error)]
    lines = [b"%b: %b\r\n" % header for header in headers]
    return b"".join([STATUS_LINE[wire_shape(error).status], *lines, b"connection: close\r\n\r\n", body])
