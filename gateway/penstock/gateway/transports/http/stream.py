"""Requests over HTTP and their answers as ASGI applications see them, whatever the version; limits of connections."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message

from penstock.engines.errors import PenstockError
from penstock.gateway.errors import HttpError
from penstock.gateway.transports.http.exchange import ARRIVAL_KEY, SENDER_KEY
from penstock.gateway.transports.sockets.connection import BodyPace, SocketPort

logger = logging.getLogger("penstock.http")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds on what one connection may cost before a handler has seen it."""

    max_connections: int = 8192
    """As many requests may run on all HTTP/2 connections together, too."""
    max_streams: int = 1024
    """Requests at a time on one HTTP/2 connection."""
    max_headers: int = 100
    max_header_bytes: int = 64 << 10
    """Names and values of one request together."""
    max_uri_bytes: int = 8 << 10
    max_chunks: int = 65_536
    """Of a chunked body (Triton's limit)."""
    header_timeout: float = 10.0
    """Seconds from the first byte, or from connecting, to the end of the headers, however they trickle in."""
    body_idle_timeout: float = 10.0
    """Seconds without any byte of an unfinished body, and before `body_rate` is asked for."""
    body_rate: float = 1024.0
    """Bytes that each further second of an unfinished body must have brought, on average."""
    body_timeout: float = 600.0
    """Seconds that a whole body may take."""
    send_timeout: float = 60.0
    """Seconds without any byte taken by the client while output waits for it."""
    keep_alive_timeout: float = 75.0
    """Seconds that a connection may be idle between two requests. Proxies keep theirs for 60: where the server closes
    first, a request can cross the close on its way, and becomes a 502."""


Field = tuple[bytes, bytes]
WITHOUT_BODY = frozenset({204, 304})
"""Statuses of answers that have none."""


class AnswerHead(NamedTuple):
    block: bytes
    """As it is sent."""
    length: int | None
    """What the content-length says; None: nobody knows."""
    has_body: bool


@dataclass(slots=True, kw_only=True)
class HttpPort(SocketPort):
    """What the connections of a port share, those of HTTP/1.1 and of HTTP/2."""

    app: ASGIApp
    http_limits: ConnectionLimits
    running: set[HttpStream] = field(default_factory=set)
    """Requests whose handlers run."""
    date: bytes = b""
    date_line: bytes = b""

    def tick(self) -> None:
        """Once a second: the time that answers tell."""
        self.date = formatdate(usegmt=True).encode()
        self.date_line = b"date: %b\r\n" % self.date


def connection_scope(transport: asyncio.BaseTransport, version: str) -> dict[str, Any]:
    """What the ASGI scopes of all requests of a connection have."""
    own: socket.socket = transport.get_extra_info("socket")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": version,
        "server": _address(own.getsockname),
        "client": _address(own.getpeername),
        "scheme": "http" if transport.get_extra_info("sslcontext") is None else "https",
        "root_path": "",
    }


def _address(name: Callable[[], Any]) -> tuple[str, int] | None:
    try:
        address = name()
    except OSError:  # the client has gone
        return None
    return (str(address[0]), int(address[1])) if isinstance(address, tuple) else None


class HttpStream(ABC):
    """ASGI's `receive` and `send`, and the BodyWriter of the answer."""

    # What most requests never change is no field of each.
    written = 0
    """Bytes of the answer so far: its head and its body, with the framing of HTTP/1.1."""
    gone = False
    """Over before the answer is: the client has left, or been refused."""
    complete = False
    """All of the answer is given to the connection."""
    _received = 0
    """Bytes of the body that have come."""
    _ended = False
    """All of the body has come."""
    _taken = False
    """All of it is read."""
    _more: asyncio.Future[None] | None = None
    _pace: BodyPace | None = None
    started = False
    """The answer has begun."""
    _has_body = True
    _head = b""
    """Waits for the body that it leaves with."""
    _left: int | None = None
    """Bytes of the body that are missing, where its length was told."""
    _drops_rest = False
    """What is left of the body is read only so that the client sees its answer; the stream ends then."""
    _room: asyncio.Future[None] | None = None
    _client_left: Callable[[], None] | None = None

    def __init__(self, port: HttpPort, method: str, *, expects_continue: bool) -> None:
        self.method = method
        self._port = port
        self._continue = expects_continue
        """The client waits for a word before it sends the body."""
        self._loop = asyncio.get_running_loop()
        self._pieces: list[bytes] = []

    # What a version of HTTP has

    @abstractmethod
    def refuse(self, error: PenstockError) -> None:
        """Answers in the handler's stead where it has not begun to, and ends the stream."""

    @abstractmethod
    def wants_body(self) -> None:
        """The handler waits for more of the body."""

    @abstractmethod
    def took(self, size: int) -> None:
        """The handler has got so many bytes of the body."""

    @abstractmethod
    def answer_head(self, status: int, headers: Iterable[Field]) -> AnswerHead:
        """Raises RuntimeError for names and values that no header can have."""

    @abstractmethod
    def write_head(self, block: bytes) -> None:
        """Without a body behind it yet."""

    @abstractmethod
    def write(self, head: bytes, data: bytes) -> None:
        """A piece of the body behind the head, which may be empty; the last one if the answer is `complete`."""

    @property
    @abstractmethod
    def full(self) -> bool:
        """The client is slow: much waits for it."""

    def over(self) -> None:
        """The handler has ended."""

    # The handler

    def start(self, scope: dict[str, Any]) -> None:
        scope[ARRIVAL_KEY] = time.monotonic()
        scope[SENDER_KEY] = self
        self._port.running.add(self)
        self.task = self._loop.create_task(self.run(scope))

    async def run(self, scope: dict[str, Any]) -> None:
        try:
            await self._port.app(scope, self.receive, self.send)
        except Exception as error:
            logger.error("a request failed", exc_info=error)
        finally:
            if not (self.complete or self.gone):
                self.refuse(HttpError(500, "The server could not complete the answer.", code="internal_error"))
            if self._drops_rest and not self.gone:
                await self.drop_rest()
            self._port.running.discard(self)
            self.over()

    async def drop_rest(self) -> None:
        """Of a body that was refused before its end, for a version of HTTP where only the stream knows it."""

    # The request

    async def receive(self) -> Message:
        while not (self.gone or self.complete):
            if self._pieces or (self._ended and not self._taken):
                return self._take()
            if not self._ended:
                self.wants_body()
            self._more = self._loop.create_future()
            await self._more
        return {"type": "http.disconnect"}

    def _take(self) -> Message:
        body = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._taken = self._ended
        self.took(len(body))
        return {"type": "http.request", "body": body, "more_body": not self._ended}

    def late(self, now: float) -> bool:
        """The body comes too slowly. To be looked at about once a second; time in which the handler does not wait for
        the body does not count."""
        if self._ended or self.complete:
            return False
        if self._pace is None:
            limits = self._port.http_limits
            idle = limits.body_idle_timeout
            self._pace = BodyPace(idle, limits.body_rate, limits.body_timeout, now, max_idle=idle)
        return self._pace.late(now, self._received, waited=self._more is not None and not self._more.done())

    def disconnect(self) -> None:
        """Nothing more is received or sent. Idempotent."""
        self.gone = True
        self._pieces.clear()
        wake(self._more)
        wake(self._room)
        self._tell_client_left()

    # The answer

    async def send(self, message: Message) -> None:
        if self.full and not self.gone:
            await self.drain()
        if self.gone:
            return
        if message["type"] == "http.response.start":
            self._start(message["status"], message.get("headers", ()))
        else:
            self._body(message.get("body", b""), more=message.get("more_body", False))

    async def answer(self, status: int, headers: Iterable[Field], body: bytes) -> None:
        if self.full and not self.gone:
            await self.drain()
        if not self.gone:
            self._start(status, headers)
            self._body(body, more=False)

    def _start(self, status: int, headers: Iterable[Field]) -> None:
        if self.started:
            raise RuntimeError("The answer has begun already.")
        head = self.answer_head(status, headers)
        self.started = True
        self._has_body = head.has_body
        self._left = head.length if head.has_body else None
        self.written = len(head.block)
        if head.length is not None or not head.has_body:
            self._head = head.block
        else:  # a stream's first events may be long in coming
            self.write_head(head.block)

    def _body(self, data: bytes, *, more: bool) -> None:
        if self.complete or not self.started:
            raise RuntimeError("The answer is complete, or has not begun.")
        if not self._has_body:
            data = b""
        elif self._left is not None:
            self._left -= len(data)
            if self._left < 0 or (self._left and not more):
                raise RuntimeError("The answer is not as long as its content-length.")
        head, self._head = self._head, b""
        self.complete = not more
        self.write(head, data)
        if self.complete:
            wake(self._more)

    async def drain(self) -> None:
        while self.full and not self.gone:
            self._room = self._loop.create_future()
            await self._room

    def room(self) -> None:
        """Less waits for the client than before."""
        wake(self._room)

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


def wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)
