"""One HTTP request and its response, as our endpoints see them."""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Iterable, Sequence

from starlette.types import Message, Receive, Scope, Send

from penstock.engines.errors import InvalidRequestError, PayloadTooLargeError
from penstock.gateway.errors import HttpError, error_headers, error_json, wire_shape
from penstock.gateway.front.drain import DrainState

Headers = list[tuple[bytes, bytes]]

SCOPE_KEY = "penstock.exchange"
_JSON = b"application/json"
_NOT_IN_REQUEST_ID = re.compile(rb"[^A-Za-z0-9._:/+=@-]")
_SECONDS = re.compile(rb"[0-9]{1,9}(\.[0-9]{1,9})?")
_MAX_REQUEST_ID = 128
_PROCESS_ID = uuid.uuid4().hex[:20].encode()
_numbers = itertools.count(1)
"""Fresh ids: random for the process and counted within it, which costs a tenth of a random one for each request."""
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ClientGone(Exception):
    """The client left before its request was complete; nobody is there to answer."""


class Exchange:
    """Reads the body within its limit; sends a whole response or a stream of ready-made frames.

    `raw_send` is the server's own: the token path calls it without a layer between.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, drain: DrainState) -> None:
        self.scope = scope
        self.receive = receive
        self.raw_send = send
        self.drain = drain
        self.tenant = ""
        self.started = False
        self.streaming = False
        self.headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))
        """By lower-case name; of several with the same name the first one."""
        self.extra_headers: Sequence[tuple[bytes, bytes]] = ()
        """What the answer carries, whichever it will be, beside its id."""
        self.request_id = _request_id(self.headers.get(b"x-request-id"))

    def only_header(self, name: bytes) -> bytes | None:
        """Raises InvalidRequestError when there are several of this (lower-case) name."""
        given = self.scope["headers"]
        if len(given) != len(self.headers) and sum(key == name for key, _ in given) > 1:
            raise InvalidRequestError(f"{name.decode().title()} is given more than once.")
        return self.headers.get(name)

    def timeout(self) -> float | None:
        """Seconds that the client gives its request in `X-Request-Timeout`, if it does. Raises InvalidRequestError."""
        given = self.headers.get(b"x-request-timeout")
        if given is None:
            return None
        if not _SECONDS.fullmatch(given) or not float(given):
            raise InvalidRequestError("X-Request-Timeout must be a number of seconds above 0.")
        return float(given)

    async def body(self, limit: int) -> bytes:
        """The whole JSON body. Raises as `read`, and HttpError 415."""
        self._check_body_headers()
        return await self.read(limit)

    async def read(self, limit: int) -> bytes:
        """The whole body, whatever is in it. Checks Content-Length first, then counts. Raises PayloadTooLargeError,
        InvalidRequestError, and ClientGone when the client leaves before the end."""
        self._check_length(limit)
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk: bytes = message.get("body", b"")
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    def _check_body_headers(self) -> None:
        encoding = self.headers.get(b"content-encoding")
        if encoding is not None and encoding.strip().lower() not in (b"", b"identity"):
            raise HttpError(415, "Compressed request bodies are not supported.", code="unsupported_encoding")
        kind = (self.headers.get(b"content-type") or _JSON).partition(b";")[0].strip().lower()
        if kind != _JSON:
            raise HttpError(415, "The request body must be application/json.", code="unsupported_media_type")

    def _check_length(self, limit: int) -> None:
        length = self.headers.get(b"content-length")
        if length is None:
            return
        if not length.isdigit() or len(length) > 19:
            raise InvalidRequestError("Content-Length is not a number.")
        if int(length) > limit:
            raise _too_large(limit)

    async def send(self, message: Message) -> None:
        """For endpoints that speak ASGI themselves: notes the start and adds what every response carries."""
        if message["type"] == "http.response.start":
            self.started = True
            message = {**message, "headers": [*message.get("headers", ()), *self._common_headers()]}
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
        await self._start(status, [(b"content-type", content_type), (b"content-length", length), *headers])
        await self.raw_send({"type": "http.response.body", "body": body, "more_body": False})

    async def start_stream(self, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        """Sends 200 and the headers of an event stream, with these added."""
        self.streaming = True
        await self._start(200, [*_SSE_HEADERS, *headers])

    async def finish(self, frames: bytes) -> None:
        """Sends the last frames and ends the stream."""
        await self.raw_send({"type": "http.response.body", "body": frames, "more_body": False})

    async def fail(self, error: Exception) -> None:
        """Says the error in the shape that is still possible: a status before the first byte, an event after it."""
        if self.streaming:
            await self.finish(b"data: " + error_json(error) + b"\n\ndata: [DONE]\n\n")
        elif not self.started:
            await self.respond(wire_shape(error).status, error_json(error), headers=error_headers(error))

    async def _start(self, status: int, headers: Headers) -> None:
        self.started = True
        headers = [*headers, *self._common_headers()]
        await self.raw_send({"type": "http.response.start", "status": status, "headers": headers})

    def _common_headers(self) -> Headers:
        headers = [(b"x-request-id", self.request_id), *self.extra_headers]
        if self.drain.draining:
            headers.append((b"connection", b"close"))
        return headers


def _request_id(given: bytes | None) -> bytes:
    """The client's id, cut and cleaned, which is only ever echoed; or a fresh one."""
    cleaned = _NOT_IN_REQUEST_ID.sub(b"", given)[:_MAX_REQUEST_ID] if given else b""
    return cleaned or b"%b%012x" % (_PROCESS_ID, next(_numbers))


def _too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The request body is larger than {limit} bytes.")
