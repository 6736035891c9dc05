"""The reference server's connections: HTTP/1.1 on the standard event loop, whose writes go to the kernel at once."""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from time import perf_counter
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

import msgspec

from penstock.loadtest.messages import Sample
from penstock.loadtest.mock.options import MockOptions, Schedule
from penstock.loadtest.mock.wire import STREAM_HEAD, Request, Wire, json, metadata
from penstock.loadtest.precise_timer import PreciseTimer

_KEPT = 20_000


class Record(msgspec.Struct, kw_only=True):
    """One answer. Times are of time.perf_counter, which the processes of a machine share."""

    received: float
    """The request's last byte was read."""
    tokens: int
    writes: list[float] = []
    """For each token, just before it was handed to the kernel."""
    late: list[float] = []
    """For each token, seconds by which that was after it was due."""


class Truth:
    """Of the last requests that were answered in full."""

    def __init__(self) -> None:
        self.records: deque[Record] = deque(maxlen=_KEPT)

    def clear(self) -> None:
        self.records.clear()

    def summary(self, *, records: bool = False) -> dict[str, Any]:
        """The figures as a client would name them, in milliseconds; with `records`, these too."""
        # numpy, only when a client asks for times: until then this server is nothing but its loop
        from penstock.loadtest.metrics import Distribution, summarize

        origin = min((record.received for record in self.records), default=0.0)
        samples = [
            Sample(
                index=index,
                intended=record.received - origin,
                sent=record.received - origin,
                ended=record.writes[-1] - origin,
                arrivals=[time - origin for time in record.writes],
                output_tokens=record.tokens,
            )
            for index, record in enumerate(self.records)
        ]
        figures = msgspec.to_builtins(summarize(samples, open_loop=False))
        names = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "completed", "output_tokens", "output_tokens_per_s")
        summary = {name: figures[name] for name in names}
        summary["late_ms"] = msgspec.to_builtins(Distribution.of([late for r in self.records for late in r.late]))
        summary["cpu_seconds"] = time.process_time()
        if records:
            summary["requests"] = msgspec.to_builtins(list(self.records))
        return summary


_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,12})", re.IGNORECASE)
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:", re.IGNORECASE)
_CLOSE = re.compile(rb"\r\nconnection:[^\r\n]*\bclose\b", re.IGNORECASE)
_CONTINUE = re.compile(rb"\r\nexpect:[ \t]*100-continue", re.IGNORECASE)
_EARLY = 20e-6
"""Seconds by which a write may come early: going to sleep again takes longer."""
_BUDGET = 1
"""Writes of one stream before it is another's turn: so that a client that keeps up reads them one by one."""
_ALIKE = 1024
"""Answers that look the same are made once: what comes while one is made would be read late."""
_decode = msgspec.json.Decoder(Request).decode


class Mock:
    """Use as `async with Mock(options) as mock`, on an event loop of asyncio's own."""

    def __init__(self, options: MockOptions) -> None:
        self.options = options
        self.truth = Truth()
        self.port = options.port
        self.wire = lru_cache(_ALIKE)(partial(Wire, options=options))
        self.connections: set[Connection] = set()

    @property
    def in_flight(self) -> int:
        """Answers on their way."""
        return sum(connection.busy for connection in self.connections)

    @property
    def blocked(self) -> bool:
        """A client does not take what it is sent."""
        return any(connection.blocked for connection in self.connections)

    async def __aenter__(self) -> Mock:
        """Raises OSError when it cannot listen there."""
        self.timer = PreciseTimer()
        self.schedule = Schedule(self.options, perf_counter())
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self), self.options.host, self.options.port, backlog=4096
        )
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.timer.close()

    def answer(self, method: str, target: str) -> bytes:
        """To everything but requests for tokens."""
        url = urlsplit(target)
        model = {"id": self.options.model, "object": "model", "created": 0, "owned_by": "penstock"}
        match method, url.path:
            case "GET", "/v1/models":
                return json({"object": "list", "data": [model]})
            case "GET", "/health" | "/v2/health/ready" | "/v2/health/live":
                return json({})
            case "POST", "/v2/repository/index":
                return json([{"name": self.options.model, "version": "1", "state": "READY"}])
            case "GET", path if path == f"/v2/models/{self.options.model}":
                return json(metadata(self.options))
            case "GET", "/truth":
                return json(self.truth.summary(records="each" in parse_qs(url.query, keep_blank_values=True)))
            case "DELETE", "/truth":
                self.truth.clear()
                return json({})
        return json({"error": {"message": f"there is no {method} {url.path}"}}, 404)


class Connection(asyncio.Protocol):
    """One client; one request at a time."""

    def __init__(self, mock: Mock) -> None:
        self._mock = mock
        self._buffer = bytearray()
        self._expected = False
        self._answer: Stream | None = None
        self.blocked = False

    @property
    def busy(self) -> bool:
        return self._answer is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._mock.connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if self._answer is None:
            self._take(perf_counter())

    def pause_writing(self) -> None:
        self.blocked = True

    def resume_writing(self) -> None:
        self.blocked = False
        if self._answer is not None:
            self._answer.write()

    def connection_lost(self, exc: Exception | None) -> None:
        self._mock.connections.discard(self)
        if self._answer is not None:
            self._answer.gone = True

    def _take(self, now: float) -> None:
        """The next request, once it is complete."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._buffer[: end + 2])
        if _CHUNKED.search(head):
            self.transport.write(json({"error": {"message": "a request needs a Content-Length here"}}, 411))
            self.transport.close()  # where the next request begins, only its chunks tell
            return
        length = _LENGTH.search(head)
        size = end + 4 + (int(length[1]) if length else 0)
        if len(self._buffer) < size:
            if not self._expected and _CONTINUE.search(head):
                self._expected = True
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            return
        body = bytes(self._buffer[end + 4 : size])
        del self._buffer[:size]
        self._expected = False
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        self._begin(method, rest.partition(" ")[0], body, _CLOSE.search(head) is not None, now)

    def _begin(self, method: str, target: str, body: bytes, close: bool, now: float) -> None:
        mock, path = self._mock, urlsplit(target).path
        streamed = path.endswith("/generate_stream")
        if method != "POST" or not (path.endswith(("/completions", "/generate")) or streamed):
            self.transport.write(mock.answer(method, target))
            self.done(close)
            return
        try:
            request = _decode(body)
            tokens = request.tokens
        except msgspec.MsgspecError as error:
            self.transport.write(json({"error": {"message": f"this is no request: {error}"}}, 400))
            self.done(close)
            return
        wire = mock.wire(
            path,
            tokens=tokens,
            prompt_tokens=request.prompt_tokens,
            stream=request.stream or streamed,
            with_usage=request.with_usage,
        )
        record = Record(received=now, tokens=tokens)
        self._answer = Stream(self, mock, wire, record, lambda: self.done(close))
        self._answer.write()

    def done(self, close: bool) -> None:
        self._answer = None
        if close:
            self.transport.close()
        elif self._buffer:
            self._take(perf_counter())


class Stream:
    """One answer on its way."""

    __slots__ = ("_connection", "_done", "_mock", "_next", "_per_write", "_record", "_wire", "gone")

    def __init__(
        self, connection: Connection, mock: Mock, wire: Wire, record: Record, done: Callable[[], None]
    ) -> None:
        self.gone = False
        self._connection = connection
        self._mock = mock
        self._wire = wire
        self._record = record
        self._done = done
        self._next = 0
        """The token that is written next."""
        self._per_write = mock.options.tokens_per_write or record.tokens
        if wire.whole:
            self._per_write = record.tokens

    def write(self) -> None:
        """What is due, then asks to be called again."""
        record, mock, connection = self._record, self._mock, self._connection
        for _ in range(_BUDGET):
            if self.gone or connection.blocked:
                return  # resume_writing calls again
            end = min(self._next + self._per_write, record.tokens)
            due = mock.schedule.due(record.received, end - 1)
            if due > perf_counter() + _EARLY:
                mock.timer.call_at(due, self.write)
                return
            now = perf_counter()  # before the write: no client can have read it earlier
            connection.transport.write(self._data(self._next, end))
            tokens = end - self._next
            record.writes += [now] * tokens
            record.late += [now - due] * tokens
            self._next = end
            if end == record.tokens:
                mock.truth.records.append(record)
                self.gone = True
                self._done()
                return
        asyncio.get_running_loop().call_soon(self.write)

    def _data(self, start: int, end: int) -> bytes:
        wire = self._wire
        if wire.whole:
            return wire.whole
        last = end == self._record.tokens
        tokens = end - start - last
        if start:
            return wire.token * tokens + wire.last * last
        return STREAM_HEAD + (wire.first + wire.token * (tokens - 1)) * (tokens > 0) + wire.last * last
