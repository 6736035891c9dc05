"""Connections of HTTP/1.1 on httptools' parser, with limits on all that a client may send, and on its time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import httptools

from penstock.engines.errors import InvalidRequestError, OverloadedError, PenstockError
from penstock.gateway.errors import HttpError
from penstock.gateway.transports.http.http1_heads import (
    STATUS_LINES,
    answer_head,
    error_answer,
    framing,
    size_of,
    target,
)
from penstock.gateway.transports.http.stream import AnswerHead, Field, HttpPort, HttpStream, connection_scope, wake
from penstock.gateway.transports.http2.frames import PREFACE
from penstock.gateway.transports.sockets.connection import SocketConnection

_LINGER_SECONDS = 1.0
_MAX_UNSENT_BYTES = 1 << 16
"""Of one connection, before its stream is made to wait. A TLS transport would take eight times that in."""
_LITTLE_UNSENT = 16 << 10
"""Bytes of an answer that has ended. So few are sent at once, or watched from the end of the keep-alive on."""
_MAX_UNREAD_BYTES = 1 << 16
"""Of a body that has come and that the handler has not read, before no more is received."""
_JOINED_BYTES = 1 << 16
"""Longer bodies are not copied behind their heads."""
_HTTP2_START = PREFACE[:3]
"""No method of HTTP/1.1 begins so."""
_NEVER = float("inf")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"


class _Pipelined(Exception):
    """A second request came before the first was answered."""


class Http1Stream(HttpStream):
    """The request that a connection is busy with."""

    _unread = 0
    """Bytes of the body that have come and that the handler has not read."""

    def __init__(
        self,
        connection: Http1Connection,
        port: HttpPort,
        method: str,
        *,
        expects_continue: bool,
        http_1_0: bool,
        keep_alive: bool,
    ) -> None:
        super().__init__(port, method, expects_continue=expects_continue)
        self.keep_alive = keep_alive
        """Another request may follow."""
        self._connection = connection
        self._chunked = not http_1_0
        """It has chunks, or until its head is there: may have."""

    # The request

    def feed(self, data: bytes) -> int:
        """A piece of the body. Bytes that the handler has not read."""
        self._received += len(data)
        if self.complete or self.gone:  # nobody reads it
            return 0
        self._pieces.append(data)
        self._unread += len(data)
        wake(self._more)
        return self._unread

    def end(self) -> None:
        """The body has come."""
        self._ended = True
        wake(self._more)

    def wants_body(self) -> None:
        if self._continue and not (self.started or self._received):
            self._connection.write(_CONTINUE)
        self._continue = False
        self._connection.read_on()

    def took(self, size: int) -> None:
        self._unread = 0

    def watch_client(self, left: Callable[[], None]) -> Callable[[], object]:
        self._connection.read_on()  # a long body that came at once stops it
        return super().watch_client(left)

    def refuse(self, error: PenstockError) -> None:
        self._connection.refuse(error)

    # The answer

    def answer_head(self, status: int, headers: Iterable[Field]) -> AnswerHead:
        start = self._connection.head_start(status)
        head = answer_head(start, status, self.method, headers, chunks=self._chunked, last=not self.keep_alive)
        self.keep_alive, self._chunked = not head.last, head.chunked
        return AnswerHead(head.block, head.length, head.has_body)

    def write_head(self, block: bytes) -> None:
        self._connection.write(block)

    def write(self, head: bytes, data: bytes) -> None:
        data = self._framed(data)
        if self._chunked and self.complete:
            data += _LAST_CHUNK
        self.written += len(data)
        self._connection.write_body(head, data)
        if self.complete:
            self._connection.answered(self)

    def _framed(self, data: bytes) -> bytes:
        """As a chunk, where the body has chunks: an empty one would end it."""
        return b"%x\r\n%b\r\n" % (len(data), data) if self._chunked and data else data

    @property
    def full(self) -> bool:
        return self._connection.full

    def write_body(self, data: bytes) -> bool:
        connection = self._connection
        if not self.gone and self._has_body:
            framed = self._framed(data)
            self.written += len(framed)
            connection.write_body(b"", framed)
        return not connection.full


class Http1Connection(SocketConnection):
    """One request after the other. One over a limit is answered here, and the connection closed; its handler, if it
    runs already, sees `http.disconnect`.

    What a client still has to send has a deadline: the head of a request, the next request, the end of the connection;
    a body has its pace."""

    def __init__(self, port: HttpPort, new_http2: Callable[[], SocketConnection] | None = None) -> None:
        """`new_http2` makes what takes over from here where the client speaks HTTP/2; None: that is not offered."""
        super().__init__(port)
        self._port = port
        self._limits = port.http_limits
        self._new_http2 = new_http2
        self._first_bytes: bytes | None = None if new_http2 is None else b""
        """What has come of the three that say whether this is HTTP/2; None: it is known."""
        self._parser: Any = httptools.HttpRequestParser(self)
        # a request behind one that asked for the end of the connection is dropped, and the answer arrives
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._scope: dict[str, Any] = {}
        self._stream: Http1Stream | None = None
        """The last request, until it is answered and its handler has ended."""
        self._busy = False
        """It is not answered, or its body has not come."""
        self._receives = False
        """Its body is still to come."""
        self._overhead = 0
        """Bytes received since the last piece of body: header lines, trailers, chunk extensions."""
        self._url = b""
        self._headers: list[Field] = []
        self._trailers = self._chunks = 0
        self._expects_continue = False
        self._framing = b""
        """Headers that say how long the body is, of a request that asks for another protocol."""
        self._deadline = time.monotonic() + self._limits.header_timeout
        """When `tick` ends what the client has not ended."""
        self.full = False
        self._last = False
        """No further request is taken."""
        self._served = False
        """A request has been answered."""
        self._in_pieces = False
        self._watched = False
        """The client has to take some of what waits for it, all the time."""

    # The connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        has_room = self.join(transport, _MAX_UNSENT_BYTES)
        self._scope = connection_scope(transport, "1.1")
        self._in_pieces = transport.get_extra_info("sslcontext") is not None
        self._last = self._connections.stopping
        if self._new_http2 is not None and _negotiated_http2(transport):
            if has_room:
                self._hand_over(self._new_http2(), b"")
            else:
                self.abort()  # it would not understand an answer of HTTP/1.1
        elif not has_room:
            self.refuse(OverloadedError("Too many connections."))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._ending, self.full = True, False
        if self._stream is not None:
            self._stream.disconnect()
        self._parser = self._stream = None  # they lead back here: no connection leaves a cycle

    @property
    def replaceable(self) -> bool:
        return not (self._busy or self._overhead or self._ending or self._transport.is_closing())

    @property
    def idle_since(self) -> float:
        return self._deadline - (self._limits.keep_alive_timeout if self._served else self._limits.header_timeout)

    def shutdown(self) -> None:
        self._last = True
        if not self._busy:
            self._close()
        elif self._stream is not None:
            self._stream.keep_alive = False

    def _hand_over(self, taker: SocketConnection, data: bytes) -> None:
        self._ending = True
        self._parser = None  # it knows this object
        self._connections.replace(self, taker)
        self._transport.set_protocol(taker)
        taker.connection_made(self._transport)
        if data:
            taker.data_received(data)

    # Receiving

    def data_received(self, data: bytes) -> None:
        if self._ending:
            return
        if self._first_bytes is not None:
            data = self._told_apart(data)
            if not data:
                return
        begins = self._served and not (self._busy or self._overhead)
        self._overhead += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._parser_failed(error)
            return
        if self._overhead and not self._ending:
            if self._overhead > self._limits.max_header_bytes + self._limits.max_uri_bytes:
                self.refuse(_headers_too_large())
            elif begins and not self._busy:
                self._deadline = time.monotonic() + self._limits.header_timeout

    def _told_apart(self, data: bytes) -> bytes:
        """What has come so far, once it is known to be HTTP/1.1. Empty while that is not known, and where HTTP/2 was
        handed over."""
        data = (self._first_bytes or b"") + data
        self._first_bytes = None
        if data[:3] == _HTTP2_START[: len(data)]:
            if len(data) < len(_HTTP2_START):
                self._first_bytes = data
            elif self._new_http2 is not None:
                self._hand_over(self._new_http2(), data)
            return b""
        return data

    def _feed(self, data: bytes) -> None:
        """A request that asks for another protocol is answered as if it had not; what follows it is not HTTP. Clients
        of Java and curl ask for HTTP/2 in this way, and send a body, which httptools leaves to us."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._framing:
                self._parser = httptools.HttpRequestParser(_BodyReader(self))
                self._parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % self._framing)
                self._parser.feed_data(data[upgrade.args[0] :])
            else:
                self._hang_up_after_response()

    def _parser_failed(self, error: httptools.HttpParserError) -> None:
        cause = error.__context__  # httptools wraps what its callbacks raise
        if isinstance(cause, _Pipelined):
            self._hang_up_after_response()
        elif isinstance(cause, PenstockError):
            self.refuse(cause)
        else:
            self.refuse(InvalidRequestError("Invalid HTTP request."))

    # What httptools finds. It loses what `on_message_begin` raises.

    def on_message_begin(self) -> None:
        if not self._busy:
            self._url = b""
            self._headers = []
            self._trailers = self._chunks = 0
            self._expects_continue = False

    def on_url(self, url: bytes) -> None:
        if self._busy:
            raise _Pipelined
        self._url += url
        if len(self._url) > self._limits.max_uri_bytes:
            raise HttpError(414, "The URI is too long.", code="uri_too_long")

    def on_header(self, name: bytes, value: bytes) -> None:
        headers = self._headers
        if self._receives:  # trailers are counted and dropped: the request is already being handled
            self._trailers += 1
        else:
            name = name.lower()
            headers.append((name, value))
            if name == b"expect":
                self._expects_continue = value.lower() == b"100-continue"
        if len(headers) + self._trailers > self._limits.max_headers:
            raise _headers_too_large()

    def on_headers_complete(self) -> None:
        limits, headers, parser = self._limits, self._headers, self._parser
        if self._overhead > limits.max_header_bytes and size_of(headers) > limits.max_header_bytes:
            raise _headers_too_large()
        path, raw_path, query = target(self._url)
        method = parser.get_method().decode("ascii")
        version = parser.get_http_version()
        old = version != "1.1"
        self._framing = framing(headers) if parser.should_upgrade() else b""
        self._overhead = 0
        self._busy = self._receives = True
        self._deadline = _NEVER
        stream = self._stream = Http1Stream(
            self,
            self._port,
            method,
            expects_continue=not old and self._expects_continue,
            http_1_0=old,
            keep_alive=not old and not self._last and parser.should_keep_alive(),
        )
        scope = {
            **self._scope,
            "http_version": version,
            "method": method,
            "path": path,
            "raw_path": raw_path,
            "query_string": query,
            "headers": headers,
            "state": {},
        }
        stream.start(scope)

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > self._limits.max_chunks:
            raise HttpError(400, "The request body has too many chunks.", code="too_many_chunks")

    def on_body(self, body: bytes) -> None:
        self._overhead = 0
        if self._stream is not None and self._stream.feed(body) > _MAX_UNREAD_BYTES:
            self._read(on=False)

    def on_message_complete(self) -> None:
        if self._framing and self._parser.should_upgrade():
            return  # the body comes yet
        self._receives = False
        self._overhead = 0
        stream = self._stream
        if stream is None:
            return
        stream.end()
        if self._framing:
            self._hang_up_after_response()
        if stream.complete:  # its answer was there before its end
            self._next(stream)

    def read_on(self) -> None:
        self._read(on=True)

    def _hang_up_after_response(self) -> None:
        """No pipelining: what comes behind the request that is being answered is dropped. Clients send it again."""
        self._ending = True
        if self._stream is not None:
            self._stream.keep_alive = False

    # Answering

    def head_start(self, status: int) -> bytes:
        return STATUS_LINES[status] + self._port.date_line

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._written += len(data)
            self._transport.write(data)

    def write_body(self, head: bytes, data: bytes) -> None:
        """In one write with its head, so that small answers are one packet. A TLS transport is given long bodies in
        pieces: it counts as sent what it has passed on, and passes on each write as a whole."""
        if head and len(data) < _JOINED_BYTES:
            head, data = b"", head + data
        if head:
            self.write(head)
        if self._in_pieces and len(data) > _MAX_UNSENT_BYTES:
            for start in range(0, len(data), _MAX_UNSENT_BYTES):
                self.write(data[start : start + _MAX_UNSENT_BYTES])
        elif data:
            self.write(data)

    def answered(self, stream: Http1Stream) -> None:
        """All of an answer is written."""
        self._served = True
        transport = self._transport
        if transport.is_closing() or transport.get_write_buffer_size() > _LITTLE_UNSENT:
            self._watched = True
        self.read_on()
        if self._receives:
            self._drop_rest(stream)
        else:
            self._next(stream)

    def _drop_rest(self, stream: Http1Stream) -> None:
        """The client still sends its body. Closing now would reset the connection, and the client would lose the
        answer: the rest is read and dropped for a while. TLS reads on by itself."""
        self._deadline = time.monotonic() + self._limits.body_idle_timeout
        if stream.keep_alive:
            return
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        else:
            self._close()

    def _next(self, stream: Http1Stream) -> None:
        """The request is answered, and all of it has come."""
        self._busy = False
        self._stream = None
        if stream.keep_alive:
            self._deadline = time.monotonic() + self._limits.keep_alive_timeout
        else:
            self._close()

    def pause_writing(self) -> None:
        self.full = self._watched = True

    def resume_writing(self) -> None:
        self.full = False
        if self._stream is not None:
            self._stream.room()

    # The end

    def refuse(self, error: PenstockError) -> None:
        """Answers in place of the handler, unless that has begun to answer, and closes."""
        self._ending = True
        if self._transport.is_closing():
            return
        stream = self._stream
        if self._busy and stream is not None:
            stream.disconnect()
            if stream.started:
                self._close()
                return
        self.write(error_answer(error))
        if self._transport.can_write_eof():
            # Closing at once would reset the connection while the client still sends, which would lose the answer.
            self._transport.write_eof()
            self._deadline = time.monotonic() + _LINGER_SECONDS
        else:
            self._close()

    def _close(self) -> None:
        """A TLS connection that closes waits for the client to agree, and an idle client does not even read."""
        self._ending = self._watched = True
        self._deadline = time.monotonic() + _LINGER_SECONDS
        self._transport.close()

    def tick(self, now: float) -> None:
        unsent = self._untaken() if self._watched else 0
        idle = self.reader.idle_seconds(now, self._written - unsent, unsent)
        if self._watched:
            closing = self._transport.is_closing()
            self._watched = bool(unsent) or closing
            if self._unread and closing:  # what TLS has passed on meanwhile is not counted, and needs time, too
                self._deadline = now + self._limits.send_timeout
            self._note_unread()
            if unsent and idle > self._limits.send_timeout:
                self.abort()
                return
        if self._receives and not self._ending and self._stream is not None and self._stream.late(now):
            self.refuse(_too_slow())
        elif now >= self._deadline:
            self._too_late(unsent)

    def _too_late(self, unsent: int) -> None:
        if self._transport.is_closing():
            if not unsent:
                self.abort()
        elif self._ending or self._busy or (self._served and not self._overhead):
            self._close()
        else:
            self.refuse(_too_slow())


class _BodyReader:
    """Callbacks of a parser whose head is not the client's. What follows the head of a request that asks for another
    protocol is its body first (RFC 9110, 7.8)."""

    def __init__(self, connection: Http1Connection) -> None:
        self.on_body = connection.on_body
        self.on_chunk_header = connection.on_chunk_header
        self.on_message_complete = connection.on_message_complete


def _negotiated_http2(transport: asyncio.BaseTransport) -> bool:
    tls = transport.get_extra_info("ssl_object")
    return tls is not None and tls.selected_alpn_protocol() == "h2"


def _headers_too_large() -> HttpError:
    return HttpError(431, "The request's headers are too large.", code="headers_too_large")


def _too_slow() -> HttpError:
    return HttpError(408, "The request took too long to arrive.", code="request_timeout")
