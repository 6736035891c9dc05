"""One HTTP request and its response, as our endpoints see them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from starlette.datastructures import QueryParams
from starlette.types import Message, Receive, Scope, Send

from penstock.engines.errors import InvalidRequestError, PayloadTooLargeError
from penstock.gateway.errors import HttpError, drop_traceback, error_headers
from penstock.gateway.requests.bounded_json import BYTE_ORDER_MARK
from penstock.gateway.requests.call import ClientGone, DrainState, ServedCall
from penstock.gateway.requests.context import read_context, timeout_seconds
from penstock.gateway.requests.intake import SMALL_BODY, BodyBudget, WorkPool
from penstock.gateway.requests.load_report import FORMAT_HEADER, LoadReporter
from penstock.gateway.requests.record import METHODS, OTHER_METHOD
from penstock.gateway.transports.http.compression import content_coding, decompress
from penstock.gateway.transports.http.error_form import OPENAI_ERRORS, ErrorForm

Headers = list[tuple[bytes, bytes]]

ARRIVAL_KEY = "penstock.arrival"
"""In the scope: when the request's first byte came, of time.monotonic()."""
SENDER_KEY = "penstock.sender"
"""In the scope: the BodyWriter of the response, where the server has one."""
TARGET_HEADER = b"x-penstock-target"
"""Of answers to a public name that several models serve: the one that has answered."""
IGNORED_HEADER = b"x-penstock-ignored"
"""Of answers to requests with fields that were not used as they were sent."""
_JSON = b"application/json"
_FORM = b"application/x-www-form-urlencoded"
_LONG_COMPRESSED = 1 << 10
"""Bytes of compressed data that are left to a thread: they may be a megabyte."""
_OF_BROWSERS = (b"origin", b"referer", b"cookie", b"accept-language")
"""Every browser sends the last with every request, also those that send no Origin and no Sec-Fetch-Site with a POST."""
EVENT_STREAM = b"text/event-stream; charset=utf-8"
_STREAM_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class StreamWriter(Protocol):
    """More of a body that has begun."""

    def write_body(self, data: bytes) -> bool:
        """`data` is not empty. False: wait with `drain` before the next call."""
        ...

    async def drain(self) -> None:
        """Returns when the client has taken most of what was written, or has left."""
        ...


class BodyWriter(StreamWriter, Protocol):
    """Shortcuts beside ASGI: past `send`, for a whole answer, and for more of a body that has begun; past `receive`, to
    learn that the client has left."""

    written: int
    """Bytes of the response so far, its head and framing with them."""

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """All of it."""
        ...

    def watch_client(self, left: Callable[[], None]) -> Callable[[], object]:
        """Calls `left` if the client leaves before its answer is complete, which may be at once. To be called after the
        body has been read. Call what this returns to end the watch."""
        ...


class _SendWriter:
    """Writes with ASGI's `send`, where the server has no shortcut."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._waiting: list[bytes] = []

    def write_body(self, data: bytes) -> bool:
        self._waiting.append(data)
        return False

    async def drain(self) -> None:
        data, self._waiting = b"".join(self._waiting), []
        if data:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})


class Exchange:
    """Reads the body within its limit; sends a whole response, or a stream of frames that are ready to send.

    `raw_send` is ASGI's `send` as the server gave it: streams call it for each token without a layer in between.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        drain: DrainState,
        bodies: BodyBudget | None = None,
        pool: WorkPool | None = None,
    ) -> None:
        """`bodies` counts what large bodies take; None: they are not counted. `pool`: for compressed ones; None: the
        server has made this request itself, and has compressed nothing."""
        self.scope = scope
        self.receive = receive
        self.raw_send = send
        self.drain = drain
        self._bodies = bodies
        self._pool = pool
        self._read_before: bytes | None = None
        self.started = False
        self.streaming = False
        self.headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        """By lower-case name; of several with the same name the first one."""
        self._repeats = len(self.headers) != len(scope["headers"])
        """Some have the same name."""
        self.extra_headers: Sequence[tuple[bytes, bytes]] = ()
        """Of any answer, also an error, beside its id."""
        self.load: LoadReporter | None = None
        """Set where the answer may carry the server's load."""
        self.counts_late = False
        """It may only read another request's stream, which the body tells: its endpoint counts it against the quota."""
        self.error_form: ErrorForm = OPENAI_ERRORS
        self.names: Mapping[str, str] = {}
        """What the path has in place of its route's {names}."""
        self.context = read_context(self.headers)
        self.context.arrival = scope.get(ARRIVAL_KEY, self.context.arrival)
        self.context.record.method = scope["method"] if scope["method"] in METHODS else OTHER_METHOD
        self.context.record.http_version = scope.get("http_version", "")
        self.body_writer: BodyWriter | None = scope.get(SENDER_KEY)

    @property
    def query(self) -> QueryParams:
        return QueryParams(self.scope["query_string"])

    @property
    def writer(self) -> StreamWriter:
        """For the rest of a stream that has begun."""
        return self.body_writer or _SendWriter(self.raw_send)

    def close_record(self) -> None:
        """At the end of the request, however it ended."""
        if self.body_writer is not None:
            self.context.record.bytes_out = self.body_writer.written

    def only_header(self, name: bytes) -> bytes | None:
        """Raises InvalidRequestError when there are several of this (lower-case) name."""
        if self._repeats and sum(key == name for key, _ in self.scope["headers"]) > 1:
            raise InvalidRequestError(f"{name.decode().title()} is given more than once.")
        return self.headers.get(name)

    def read_deadline(self) -> None:
        """Sets the context's deadline to what the client says in `X-Request-Timeout`, if it does. Raises
        InvalidRequestError."""
        seconds = self.headers.get(b"x-request-timeout")
        if seconds is not None:
            self.context.limit(timeout_seconds(seconds.decode("latin-1")))

    def call(self) -> ServedCall:
        """The work that this request asks for. Call its `watch` as soon as the body is read."""
        return ServedCall(self.drain, self.context, self._watch_client)

    def _watch_client(self, left: Callable[[], None]) -> Callable[[], object]:
        if self.body_writer is not None:
            return self.body_writer.watch_client(left)
        return asyncio.get_running_loop().create_task(self._until_client_leaves(left)).cancel

    async def _until_client_leaves(self, left: Callable[[], None]) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass
        left()

    async def body(self, limit: int, *, from_curl: bool = False) -> bytes:
        """The whole JSON body, decompressed and without a byte-order mark. Raises as `read` and `decompressed`, and
        HttpError 415. `from_curl`: it may be labelled a form, where no browser can have sent it."""
        if self._read_before is not None:
            body, self._read_before = self._read_before, None
            return body
        self._check_content_type(from_curl)
        coding = content_coding(self.headers[b"content-encoding"]) if b"content-encoding" in self.headers else b""
        body = await self.read(limit)
        if coding:
            body = await self.decompressed(coding, body, limit)
        return body.removeprefix(BYTE_ORDER_MARK)

    async def decompressed(self, coding: bytes, body: bytes, limit: int) -> bytes:
        """The body, which has this coding; in a thread where it may be long. Raises PayloadTooLargeError,
        InvalidRequestError, OverloadedError."""
        if self._pool is None or len(body) < _LONG_COMPRESSED:
            body = decompress(coding, body, limit, self.hold_body)
        else:
            body = await self._pool.run(len(body), decompress, coding, body, limit, self.hold_body)
        self.context.record.bytes_in = len(body)  # by which it is judged how much work its texts are
        return body

    async def read(self, limit: int) -> bytes:
        """The whole body, whatever is in it. Checks Content-Length first, then counts. Raises PayloadTooLargeError,
        InvalidRequestError, OverloadedError, and ClientGone when the client leaves before the end."""
        self._check_length(limit)
        chunks: list[bytes] = []
        record = self.context.record
        size, counted = 0, SMALL_BODY
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk: bytes = message.get("body", b"")
            size += len(chunk)
            record.bytes_in = size
            if size > limit:
                raise _too_large(limit)
            if size > counted:
                self.hold_body(size - counted)
                counted = size
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    def put_back(self, body: bytes) -> None:
        """The next call of `body` gives this one again."""
        self._read_before = body

    def hold_body(self, size: int) -> None:
        """Counts `size` more bytes of the body as in memory, until the request ends. Raises OverloadedError."""
        if self._bodies is not None:
            self.context.hold_body(self._bodies, size)

    def _check_content_type(self, from_curl: bool) -> None:
        kind = (self.headers.get(b"content-type") or _JSON).partition(b";")[0].strip().lower()
        if kind != _JSON and not (from_curl and kind == _FORM and self._no_browser()):
            raise HttpError(
                415,
                "The request body needs the header Content-Type: application/json.",
                code="unsupported_media_type",
            )

    def _no_browser(self) -> bool:
        """`curl -d` labels whatever it sends a form. So can a page, without a preflight, but not without headers that
        it has no power over."""
        return not any(name in _OF_BROWSERS or name.startswith(b"sec-") for name in self.headers)

    def _check_length(self, limit: int) -> None:
        length = self.headers.get(b"content-length")
        if length is None:
            return
        if not length.isdigit() or len(length) > 19:
            raise InvalidRequestError("Content-Length is not a number.")
        if int(length) > limit:
            raise _too_large(limit)
        if self._bodies is not None:
            self._bodies.check(int(length))

    async def send(self, message: Message) -> None:
        """For endpoints that speak ASGI themselves: notes the start and adds what every response carries."""
        if message["type"] == "http.response.start":
            headers = self._all_headers(message["status"], message.get("headers", ()))
            message = {**message, "headers": headers}
        await self.raw_send(message)

    async def respond(
        self,
        status: int,
        body: bytes,
        *,
        content_type: bytes = _JSON,
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        length = b"%d" % len(body)
        await self.answer(status, [(b"content-type", content_type), (b"content-length", length), *headers], body)

    async def answer(self, status: int, headers: Headers, body: bytes) -> None:
        """The whole of it. `headers` have the content-length."""
        if self.body_writer is not None:
            await self.body_writer.answer(status, self._all_headers(status, headers), body)
            return
        await self._start(status, headers)
        await self.raw_send({"type": "http.response.body", "body": body, "more_body": False})

    async def start_stream(
        self, headers: Iterable[tuple[bytes, bytes]] = (), *, content_type: bytes = EVENT_STREAM
    ) -> None:
        """Sends 200 and the headers of a stream, with these added."""
        self.streaming = True
        await self._start(200, [(b"content-type", content_type), *_STREAM_HEADERS, *headers])

    async def finish(self, frames: bytes) -> None:
        """Sends the last frames and ends the stream."""
        await self.raw_send({"type": "http.response.body", "body": frames, "more_body": False})

    async def fail(self, error: Exception) -> None:
        """Tells the client the error: with a status before the first byte, as an event in a stream that has begun."""
        self.context.record.failed(error)
        if self.streaming:
            await self.finish(self.error_form.last_events(error, self.context.id))
        elif not self.started:
            form = self.error_form
            await self.respond(form.status(error), form.body(error, self.context.id), headers=error_headers(error))
        drop_traceback(error)

    async def _start(self, status: int, headers: Headers) -> None:
        headers = self._all_headers(status, headers)
        await self.raw_send({"type": "http.response.start", "status": status, "headers": headers})

    def _all_headers(self, status: int, headers: Headers) -> Headers:
        """The answer begins."""
        self.started = True
        self.context.record.status = str(status)
        return [*headers, *self._common_headers()]

    def _common_headers(self) -> Headers:
        request_id = self.context.id.encode()
        headers = [*((name, request_id) for name in self.error_form.id_headers), *self.extra_headers]
        if self.context.record.target:
            headers.append((TARGET_HEADER, self.context.record.target_told.encode()))
        if self.context.record.ignored:
            headers.append((IGNORED_HEADER, self.context.record.ignored_told.encode()))
        if self.context.principal.quota is not None:
            headers += self.context.principal.quota.headers()
        if self.load is not None:
            headers += self.load.http_headers(self.headers.get(FORMAT_HEADER))
        if self.drain.leaving:
            headers.append((b"connection", b"close"))
        return headers


def _too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The request body is larger than {limit} bytes.")
