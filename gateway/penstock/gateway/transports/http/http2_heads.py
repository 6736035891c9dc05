"""Heads of requests and answers of HTTP/2, between its fields and what ASGI has."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import unquote

import msgspec

from penstock.engines.errors import InvalidRequestError, PenstockError
from penstock.gateway.errors import HttpError, error_headers, error_json, wire_shape
from penstock.gateway.transports.http.stream import WITHOUT_BODY, AnswerHead, ConnectionLimits
from penstock.gateway.transports.http2.heads import RequestHead
from penstock.gateway.transports.http2.hpack import Field, encode_fields

_PATH = re.compile(rb"/[!-~]*")
_OF_CONNECTIONS = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"})
_BAD_NAME = re.compile(rb"[^!#$%&'*+\-.^_`|~0-9a-z]")
_BAD_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_KNOWN_FIELDS, _KNOWN_BYTES = 4096, 256
_UNIMPLEMENTED = b"12"
CONTINUE = encode_fields([(b":status", b"100")])


class AskedHead(msgspec.Struct, frozen=True):
    """Of a request, as ASGI's scope has it."""

    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: list[Field]
    content_length: int | None
    expects_continue: bool


def asked_head(head: RequestHead, limits: ConnectionLimits) -> AskedHead:
    """Raises HttpError 414 and 431, InvalidRequestError."""
    if len(head.path) > limits.max_uri_bytes:
        raise HttpError(414, "The URI is too long.", code="uri_too_long")
    if head.too_large or len(head.fields) > limits.max_headers or _bytes(head) > limits.max_header_bytes:
        raise HttpError(431, "The request's headers are too large.", code="headers_too_large")
    if not _PATH.fullmatch(head.path):
        raise InvalidRequestError("The path of the request is malformed.")
    if any(_BAD_VALUE.search(value) for _, value in head.fields):  # some are told again, in headers of the answer
        raise InvalidRequestError("A header of the request has control characters.")
    raw_path, _, query = head.path.partition(b"#")[0].partition(b"?")
    path = raw_path.decode("ascii")
    return AskedHead(
        head.method.decode("ascii"),
        unquote(path) if "%" in path else path,
        raw_path,
        query,
        _headers(head),
        head.content_length,
        any(name == b"expect" and value.lower() == b"100-continue" for name, value in head.fields),
    )


def _bytes(head: RequestHead) -> int:
    return sum([len(name) + len(value) for name, value in head.fields])


def _headers(head: RequestHead) -> list[Field]:
    """With the authority as `host`, by which the guard against web pages goes. Where both are given, they are the
    same."""
    if not head.authority:
        return list(head.fields)
    return [(b"host", head.authority), *(field for field in head.fields if field[0] != b"host")]


def grpc_refusal(text: bytes) -> bytes:
    """The block of a whole answer, as clients of gRPC understand it. `text` is printable and has no percent signs."""
    fields = [(b":status", b"200"), (b"content-type", b"application/grpc"), (b"grpc-status", _UNIMPLEMENTED)]
    return encode_fields([*fields, (b"grpc-message", text)])


def answer_head(status: int, method: str, headers: Iterable[Field]) -> tuple[AnswerHead, bool]:
    """And whether the client is asked to open another connection for further requests. Raises RuntimeError for names
    and values that no header can have."""
    length, closes = None, False
    blocks = [_field(b":status", b"%d" % status)]
    for name, value in headers:
        if name in _OF_CONNECTIONS:
            closes = closes or (name == b"connection" and b"close" in value.lower())
            continue
        if name == b"content-length":
            length = int(value)
        blocks.append(_field(name, value))
    return AnswerHead(b"".join(blocks), length, method != "HEAD" and status not in WITHOUT_BODY), closes


def _field(name: bytes, value: bytes) -> bytes:
    """Long ones are not remembered: some are the client's own words."""
    return _known_field(name, value) if len(value) <= _KNOWN_BYTES else _new_field(name, value)


def _new_field(name: bytes, value: bytes) -> bytes:
    if name != b":status" and (_BAD_NAME.search(name) or _BAD_VALUE.search(value)):
        raise RuntimeError("Invalid HTTP header.")
    return encode_fields([(name, value)])


_known_field = lru_cache(_KNOWN_FIELDS)(_new_field)


def error_answer(error: PenstockError, method: str, date: bytes) -> tuple[bytes, bytes]:
    """Block and body of an answer that no handler has given."""
    body = error_json(error)
    fields = [(b"date", date), (b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    head, _ = answer_head(wire_shape(error).status, method, [*fields, *error_headers(error)])
    return head.block, body if head.has_body else b""
