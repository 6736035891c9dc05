"""Heads of requests and answers of HTTP/1.1, between their bytes and what ASGI has."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import unquote

import httptools

from penstock.engines.errors import InvalidRequestError, PenstockError
from penstock.gateway.errors import error_headers, error_json, wire_shape
from penstock.gateway.transports.http.stream import WITHOUT_BODY, Field

_KNOWN_BYTES, _KNOWN = 256, 1024
"""Targets and names that are remembered: how long they may be, and how many."""
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})
_TOKEN = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_TEXT = bytes([9, *range(0x20, 0x7F), *range(0x80, 0x100)])
"""What values of headers are made of."""
_CLOSE = b"connection: close\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n"


class RequestTarget(NamedTuple):
    """Of a request line, as ASGI's scope has it."""

    path: str
    raw_path: bytes
    query: bytes


def _new_target(url: bytes) -> RequestTarget:
    """Raises InvalidRequestError."""
    try:
        parsed = httptools.parse_url(url)
        path = parsed.path.decode("ascii")
    except (httptools.HttpParserInvalidURLError, AttributeError, UnicodeDecodeError):
        raise InvalidRequestError("Invalid HTTP request.") from None
    return RequestTarget(unquote(path) if "%" in path else path, parsed.path, parsed.query or b"")


_known_target = lru_cache(_KNOWN)(_new_target)


def target(url: bytes) -> RequestTarget:
    """Raises InvalidRequestError."""
    return _known_target(url) if len(url) <= _KNOWN_BYTES else _new_target(url)


def _status_line(status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/1.1 {status} {phrase}\r\n".encode()


STATUS_LINES = {status: _status_line(status) for status in range(100, 600)}


class Http1Head(NamedTuple):
    """Of an answer."""

    block: bytes
    length: int | None
    """What the content-length says; None: nobody knows."""
    has_body: bool
    chunked: bool
    last: bool
    """The connection ends with it."""


def answer_head(
    start: bytes, status: int, method: str, headers: Iterable[Field], *, chunks: bool, last: bool
) -> Http1Head:
    """A body of unknown length has chunks where the client knows them (`chunks`), or ends with the connection. Raises
    RuntimeError for names and values that no header can have."""
    length: int | None = None
    lines = [start]
    chunked = closes = False
    for key, value in headers:
        name = key.lower()
        lines.append(_line(name, value))
        if name == b"content-length":
            length = int(value)
        elif name == b"connection":
            closes = closes or b"close" in value.lower()
        elif name == b"transfer-encoding":
            chunked = value.lower() == b"chunked"
    if last and not closes:
        lines.append(_CLOSE)
    has_body = method != "HEAD" and status not in WITHOUT_BODY
    in_chunks = has_body and chunks and (chunked or length is None)
    if in_chunks and not chunked:
        lines.append(_CHUNKED)
    lines.append(b"\r\n")
    return Http1Head(b"".join(lines), None if in_chunks else length, has_body, in_chunks, last or closes)


_good_names: set[bytes] = set()
"""Names of headers that have been seen to be tokens; at most `_KNOWN`."""


def _line(name: bytes, value: bytes) -> bytes:
    if name not in _good_names:
        if not name or name.translate(None, _TOKEN):
            raise RuntimeError("Invalid HTTP header name.")
        if len(_good_names) < _KNOWN:
            _good_names.add(name)
    if value.translate(None, _TEXT):
        raise RuntimeError("Invalid HTTP header value.")
    return b"%b: %b\r\n" % (name, value)


def framing(headers: Iterable[Field]) -> bytes:
    """The header lines that say how long the body is; empty where there is none."""
    return b"".join([b"%b: %b\r\n" % (name, value) for name, value in headers if name in _FRAMING])


def size_of(headers: Iterable[Field]) -> int:
    return sum([len(name) + len(value) for name, value in headers])


def error_answer(error: PenstockError) -> bytes:
    body = error_json(error)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *error_headers(error)]
    lines = [b"%b: %b\r\n" % header for header in headers]
    return b"".join([STATUS_LINES[wire_shape(error).status], *lines, _CLOSE, b"\r\n", body])
