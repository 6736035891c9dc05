"""Middleware of Ray Serve's proxies: every stream ends with an event, and every failure says what it is.

A replica that is killed ends its streams without a word: Serve's proxy closes the client's connection. This ASGI layer
lies around the proxy's app, in its process, so it is there when the replica is not any more. It

- gives the request a key of its prompt's beginnings, for the request router (`prefix_key`),
- sends the body with the request's scope: a replica otherwise asks the proxy for it, with a call between actors,
- sends a request again, to another replica, whose own has gone before the first byte of an answer, or has answered 503,
- ends a stream that was cut with the error event of its protocol,
- says Serve's own refusals (too many requests, no replica) as JSON in the caller's form, with Retry-After.

Tokens pass through it as the bytes that the replica sent.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.engines.errors import DeadlineExceededError, EngineDeadError, OverloadedError, PenstockError
from penstock.gateway.errors import error_headers
from penstock.gateway.ray_serve.answer_forms import AnswerForm, answer_form
from penstock.gateway.ray_serve.prefix_key import LARGEST_BODY, RouteKey, request_hashes
from penstock.gateway.requests.context import new_request_id

logger = logging.getLogger("penstock.ray")

REPLICA_HEADER = b"x-penstock-replica"
"""Of every answer that a replica of ours gave: which one. What comes without it is Serve's own."""
BODY = "penstock.request_body"
"""Of an ASGI scope: the whole body, as bytes."""
_MOST_TRIES = 3
_RETRY_AFTER = 2.0
_STREAMS = (b"text/event-stream", b"application/x-ndjson")
_TIMED_OUT = 408
_CANNOT_NOW = 503
_SERVES_OWN_REFUSALS = (_TIMED_OUT, 429, _CANNOT_NOW)


class StreamGuard:
    def __init__(self, app: ASGIApp, session_header: bytes) -> None:
        """`session_header`: in lower case, where Serve's routers look for a request's session."""
        self._app = app
        self._session_header = session_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        form = answer_form(scope["method"], scope["path"]) if scope["type"] == "http" else None
        if form is None:
            await self._app(scope, receive, send)
            return
        request = _Request(receive)
        await request.read()
        if request.gone:
            return
        carried = {BODY: request.body} if request.whole else {}
        key, headers = self._key(scope["headers"], carried.get(BODY, b""))
        tries = _MOST_TRIES if form.repeatable and request.whole else 1
        for tries_left in reversed(range(tries)):
            answer = _Answer(form, send, is_last=not tries_left)
            session_headers = [(self._session_header, str(key).encode())] if str(key) else []
            try:
                await self._app(
                    {**scope, **carried, "headers": [*headers, *session_headers]}, request.replay(), answer.send
                )
            except Exception:
                logger.exception("the proxy failed")
            if answer.finished or request.gone:
                return
            if answer.begun or not tries_left:
                await answer.fail()
                return
            if answer.refused_by:
                key = replace(key, avoid=(*key.avoid, answer.refused_by))
            logger.warning("%s: a replica has gone or cannot serve now: trying another one", scope["path"])

    def _key(self, headers: list[tuple[bytes, bytes]], body: bytes) -> tuple[RouteKey, list[tuple[bytes, bytes]]]:
        """And the headers without the one that becomes the key."""
        sessions = [value.decode("latin-1") for name, value in headers if name == self._session_header]
        session = sessions[0] if sessions else None
        hashes = request_hashes(body, session)
        return RouteKey(hashes), [(name, value) for name, value in headers if name != self._session_header]


class _Request:
    """What has been received is kept, so that it can be sent to more than one replica."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: list[Message] = []
        self.whole = False
        self.gone = False
        """The client has left."""

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self._messages)

    async def read(self) -> None:
        """The whole body, or its beginning where it is large: then it is passed on as it comes."""
        size = 0
        while not self.whole and not self.gone and size <= LARGEST_BODY:
            message = await self._next()
            self._messages.append(message)
            size += len(message.get("body", b""))
            self.whole = message["type"] == "http.request" and not message.get("more_body", False)

    def replay(self) -> Receive:
        messages = iter(self._messages)

        async def receive() -> Message:
            message = next(messages, None)
            return await self._next() if message is None else message

        return receive

    async def _next(self) -> Message:
        message = await self._receive()
        self.gone = self.gone or message["type"] == "http.disconnect"
        return message


class _Answer:
    """Of one replica. Its head is held back until there is something of its body."""

    def __init__(self, form: AnswerForm, send: Send, *, is_last: bool) -> None:
        """`is_last`: no other replica is asked, so that a refusal is the answer."""
        self._errors = form.errors
        self._is_last = is_last
        self.refused_by = ""
        """The replica that has no place, or no engine now: 503, which is not passed on."""
        self._send = send
        self._head: Message | None = None
        self._refusal = 0
        """The status of an answer of Serve's own, which is not passed on."""
        self._streams = False
        self.begun = False
        """The client has got a part."""
        self.finished = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._take_head(message)
            return
        if self.refused_by:
            return
        if self._refusal:
            if not message.get("more_body", False):
                await self._refuse()
            return
        if self._head is not None:
            head, self._head = self._head, None
            self.begun = True
            await self._send(head)
        self.finished = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)

    def _take_head(self, message: Message) -> None:
        headers = dict(message.get("headers", ()))
        replica = headers.get(REPLICA_HEADER, b"").decode()
        if replica and message["status"] == _CANNOT_NOW and not self._is_last:
            self.refused_by = replica
            return
        if not replica and message["status"] in _SERVES_OWN_REFUSALS:
            self._refusal = message["status"]
            return
        self._head = message
        self._streams = headers.get(b"content-type", b"").startswith(_STREAMS)

    async def _refuse(self) -> None:
        if self._refusal == _TIMED_OUT:
            await self._say(DeadlineExceededError("The request took longer than Ray Serve lets requests take."))
        else:
            await self._say(OverloadedError("No replica can take the request now.", retry_after=_RETRY_AFTER))

    async def fail(self) -> None:
        """The replica has gone. An answer that is no stream, and of which a part is sent, stays incomplete: the server
        then closes the connection, which tells the client."""
        error = EngineDeadError("The replica that served this request has ended.", retry_after=_RETRY_AFTER)
        if not self.begun:
            await self._say(error)
        elif self._streams:
            last = self._errors.last_events(error, new_request_id())
            self.finished = True
            await self._send({"type": "http.response.body", "body": last, "more_body": False})

    async def _say(self, error: PenstockError) -> None:
        body = self._errors.body(error, new_request_id())
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        self.begun = self.finished = True
        await self._send(
            {
                "type": "http.response.start",
                "status": self._errors.status(error),
                "headers": [*headers, *error_headers(error)],
            }
        )
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
