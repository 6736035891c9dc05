"""uvicorn's httptools protocol with the limits that it lacks.

As it comes, it takes headers of any size and number, waits for ever for a slow sender or reader, queues pipelined
requests (and then no longer sees their client leave), and answers broken requests in plain text. See ConnectionLimits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.errors import HttpError, error_json, wire_shape
from penstock.gateway.http.limits import ConnectionLimits


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
        on_lost: Callable[[], None],
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = limits
        self._on_lost = on_lost
        self._deaf = False
        """Nothing more is read from this client."""
        self._in_headers = True
        self._in_body = False
        self._raw_header_bytes = 0
        self._header_bytes = 0
        self._chunks = 0
        self._body_progress = False
        self._receive_timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._unsent = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deaf = True
        self._cancel_receive_timer()
        self._cancel_send_timer()
        super().connection_lost(exc)
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        self._unset_keepalive_if_required()
        if self._in_headers:
            self._raw_header_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._stop_reading()  # the request is answered as if it had not asked; what follows is not HTTP
        except httptools.HttpParserError as error:
            self._parser_failed(error)
        else:
            limits = self._limits
            if self._in_headers and self._raw_header_bytes > limits.max_header_bytes + limits.max_uri_bytes:
                self._refuse(_HEADERS_TOO_LARGE)

    def _parser_failed(self, error: httptools.HttpParserError) -> None:
        """httptools wraps what its callbacks raise."""
        cause = error.__context__
        if isinstance(cause, _Pipelined):
            self._stop_reading()
        elif isinstance(cause, HttpError):
            self._refuse(cause)
        else:
            self._refuse(InvalidRequestError("Invalid HTTP request."))

    def on_message_begin(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            raise _Pipelined
        super().on_message_begin()
        self._in_headers = True
        self._header_bytes = self._chunks = 0
        if self._receive_timer is None:
            self._arm_header_timer()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._limits.max_uri_bytes:
            raise HttpError(414, "The URI is too long.", code="uri_too_long")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        limits = self._limits
        if len(self.headers) >= limits.max_headers or self._header_bytes > limits.max_header_bytes:
            raise _HEADERS_TOO_LARGE
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._raw_header_bytes = 0
        self._cancel_receive_timer()
        self._in_body = True
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._chunks += 1
        if self._chunks > self._limits.max_chunks:
            raise HttpError(400, "The request body has too many chunks.", code="too_many_chunks")

    def on_body(self, body: bytes) -> None:
        self._body_progress = True
        if self._receive_timer is None:
            self._receive_timer = self.loop.call_later(self._limits.body_idle_timeout, self._body_timeout)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_body = False
        self._cancel_receive_timer()
        super().on_message_complete()
