"""HTTP/1.1 as a load client wants it: whole requests as bytes, answers as time-stamped reads.

While an answer comes in, a read costs an append and a look at its last bytes; framing, events and JSON are taken apart
once it is complete. So the client's own work is small, and none of it lies between two tokens of a stream.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Iterator
from time import perf_counter
from typing import cast
from urllib.parse import urlsplit

from penstock.loadtest.errors import LoadTestError

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding: *chunked", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
_LAST_CHUNK = b"0\r\n\r\n"


class ConnectionLostError(Exception):
    """The server closed the connection. `answer` is what had come, None if that was nothing."""

    def __init__(self, answer: RawAnswer | None) -> None:
        super().__init__("the connection was closed")
        self.answer = answer


class RawAnswer:
    """A response as it was read from the socket."""

    __slots__ = ("connect", "reads", "sent")

    def __init__(self, sent: float, connect: float) -> None:
        self.sent = sent
        self.connect = connect
        self.reads: list[tuple[float, bytes]] = []
        """(time.perf_counter, bytes) of each read, the head included."""

    def parse(self) -> ParsedAnswer | None:
        """None while it is incomplete."""
        raw = b"".join(data for _, data in self.reads)
        end = raw.find(b"\r\n\r\n")
        if end < 0:
            return None
        head = raw[:end]
        start = end + 4
        if _CHUNKED.search(head):
            spans = _chunks(raw, start)
        else:
            length = _LENGTH.search(head)
            size = int(length[1]) if length else len(raw) - start
            spans = [(start, size)] if len(raw) - start >= size else None
        if spans is None:
            return None
        return ParsedAnswer(_status(head), raw, spans, self)


class ParsedAnswer:
    """A complete response."""

    __slots__ = ("_reads", "_spans", "body", "status")

    def __init__(self, status: int, raw: bytes, spans: list[tuple[int, int]], answer: RawAnswer) -> None:
        self.status = status
        self.body = b"".join([raw[start : start + size] for start, size in spans])
        self._spans = spans
        self._reads = answer.reads

    def arrivals(self, ends: Iterator[int]) -> Iterator[float]:
        """For ascending offsets into the body: when the bytes before each of them had arrived."""
        available = self._available()
        offset, time = next(available)
        for end in ends:
            while offset < end:
                offset, time = next(available)
            yield time

    def _available(self) -> Iterator[tuple[int, float]]:
        """After each read: (bytes of the body that are there, time)."""
        spans = iter(self._spans)
        start, size = next(spans, (0, 0))
        body = position = 0
        for time, data in self._reads:
            position += len(data)
            while size and start + size <= position:
                body += size
                start, size = next(spans, (0, 0))
            yield body + max(0, position - start if size else 0), time


def _status(head: bytes) -> int:
    parts = head.split(b" ", 2)
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0


def _chunks(raw: bytes, position: int) -> list[tuple[int, int]] | None:
    """(start, size) of each chunk's data; None while the last one is missing."""
    spans: list[tuple[int, int]] = []
    while (line := raw.find(b"\r\n", position)) >= 0:
        try:
            size = int(raw[position:line].partition(b";")[0], 16)
        except ValueError:
            return None
        if not size:
            return spans if raw.endswith(b"\r\n\r\n") else None
        spans.append((line + 2, size))
        position = line + 4 + size
    return None


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: RawAnswer | None = None
        self._done: asyncio.Future[RawAnswer] | None = None
        self._tail = b""
        self._missing: int | None = None
        """Bytes that a response of known length still lacks; None: it is chunked, ends with the connection, or has not
        told yet."""
        self._chunked = False
        self._head_seen = False
        self._closing = False
        self.connected = 0.0
        self.usable = False
        """Open, and not announced to be closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not registered as such
        self.usable = True

    async def exchange(self, request: bytes, connect: float) -> RawAnswer:
        """Sends a request and waits for its whole answer. Raises ConnectionLostError."""
        if self._transport is None or not self.usable:
            raise ConnectionLostError(None)
        self._done = asyncio.get_running_loop().create_future()
        self._tail, self._missing, self._chunked, self._head_seen = b"", None, False, False
        self._transport.write(request)
        self._answer = RawAnswer(perf_counter(), connect)
        return await self._done

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # nobody has asked for anything
            self.close()
            return
        answer.reads.append((perf_counter(), data))
        if not self._head_seen:
            self._read_head(answer)
        elif self._missing is not None:
            self._missing -= len(data)
        if self._chunked:
            self._tail = data[-5:] if len(data) >= 5 else (self._tail + data)[-5:]
            # five bytes can be a coincidence: only the framing itself tells
            if self._tail == _LAST_CHUNK and answer.parse() is not None:
                self._finish(answer)
        elif self._missing is not None and self._missing <= 0:
            self._finish(answer)

    def _read_head(self, answer: RawAnswer) -> None:
        raw = b"".join(data for _, data in answer.reads)
        end = raw.find(b"\r\n\r\n")
        if end < 0:
            return
        self._head_seen = True
        head = raw[: end + 2]
        self._closing = _CLOSE.search(head) is not None
        self._chunked = _CHUNKED.search(head) is not None
        length = _LENGTH.search(head)
        if length and not self._chunked:
            self._missing = int(length[1]) - (len(raw) - end - 4)

    def _finish(self, answer: RawAnswer) -> None:
        done, self._answer = self._done, None
        if self._closing:
            self.close()
        if done is not None and not done.done():
            done.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        answer, done = self._answer, self._done
        self._answer = None
        if answer is None or done is None or done.done():
            return
        if self._head_seen and self._missing is None and not self._chunked:  # its end is the body's end
            done.set_result(answer)
        else:
            done.set_exception(ConnectionLostError(answer if answer.reads else None))

    def close(self) -> None:
        self.usable = False
        if self._transport is not None:
            self._transport.abort()


class ConnectionPool:
    """Connections to one server, each used by one request at a time."""

    def __init__(self, url: str, *, keep_alive: bool = True, verify_tls: bool = True) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise LoadTestError(f"{url!r} is not an http or https address")
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.path = parts.path.rstrip("/")
        self.authority = parts.netloc.rpartition("@")[2]
        self._keep_alive = keep_alive
        self._tls = _tls(verify_tls) if parts.scheme == "https" else None
        self._idle: list[Connection] = []

    async def exchange(self, request: bytes) -> RawAnswer:
        """Raises OSError when there is no connection to be had, ConnectionLostError when it is lost.

        A connection that the server has closed in the meantime is no failure: the request goes out on another one.
        """
        while self._idle:
            connection = self._idle.pop()
            if not connection.usable:
                continue
            try:
                return await self._use(connection, request, 0.0)
            except ConnectionLostError as error:
                if error.answer is not None:
                    raise
        began = perf_counter()
        _, connection = await asyncio.get_running_loop().create_connection(
            Connection, self.host, self.port, ssl=self._tls
        )
        return await self._use(connection, request, perf_counter() - began)

    async def _use(self, connection: Connection, request: bytes, connect: float) -> RawAnswer:
        try:
            answer = await connection.exchange(request, connect)
        except BaseException:
            connection.close()
            raise
        if self._keep_alive and connection.usable:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def _tls(verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
