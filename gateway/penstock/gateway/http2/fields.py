"""What the header fields of a request may be (RFC 9113, 8.2 and 8.3)."""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

from penstock.gateway.http2.errors import ErrorCode, StreamFault
from penstock.gateway.http2.hpack_decoder import FIELD_OVERHEAD, Field

_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_BAD_VALUE = re.compile(rb"[\0\r\n]|^[ \t]|[ \t]$")
_BAD_METADATA = re.compile(rb"[\0\r\n]|^\t|\t$")
"""gRPC's values may begin and end with spaces, unlike those of HTTP/2 (PROTOCOL-HTTP2.md, ASCII-Value)."""
_PSEUDO = frozenset({b":method", b":scheme", b":path", b":authority"})
_OF_CONNECTIONS = frozenset({b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade"})
_MAX_DIGITS = 19


class RequestHead(msgspec.Struct, frozen=True, gc=False):
    """The header fields of a request, which are well-formed. Requests with equal blocks share one."""

    method: bytes
    scheme: bytes
    path: bytes
    authority: bytes
    """Empty where the client names none."""
    fields: tuple[Field, ...]
    """Without the pseudo-fields; names in lower case."""
    content_length: int | None
    size: int
    """As it is counted against the limit."""
    too_large: bool
    """Above what the settings allow."""


def request_head(fields: Sequence[Field], max_bytes: int, *, spaces: bool = False) -> RequestHead:
    """`spaces`: whether values may begin and end with them. Raises StreamFault."""
    bad_value = _BAD_METADATA if spaces else _BAD_VALUE
    pseudo: dict[bytes, bytes] = {}
    regular: list[Field] = []
    hosts: list[bytes] = []
    length: bytes | None = None
    size = 0
    for field in fields:
        name, value = field
        size += len(name) + len(value) + FIELD_OVERHEAD
        if name[:1] == b":":
            if name not in _PSEUDO or name in pseudo or regular:
                raise _malformed("pseudo-fields")
            _check_value(value, _BAD_VALUE)
            pseudo[name] = value
            continue
        _check(name, value, bad_value)
        if name == b"content-length":
            if length is not None and length != value:
                raise _malformed("content-length")
            length = value
        elif name == b"host":
            hosts.append(value)
        regular.append(field)
    method, scheme = pseudo.get(b":method", b""), pseudo.get(b":scheme", b"")
    path, authority = pseudo.get(b":path", b""), pseudo.get(b":authority", b"")
    if not _NAME.fullmatch(method.lower()) or method == b"CONNECT" or not scheme:
        raise _malformed("pseudo-fields")
    if path[:1] != b"/" and (path, method) != (b"*", b"OPTIONS"):
        raise _malformed("its path")
    if hosts:
        _check_hosts(hosts, authority)
    return RequestHead(method, scheme, path, authority, tuple(regular), _length(length), size, size > max_bytes)


def check_trailers(fields: Sequence[Field]) -> None:
    """Raises StreamFault."""
    for name, value in fields:
        _check(name, value, _BAD_VALUE)


def _check(name: bytes, value: bytes, bad_value: re.Pattern[bytes]) -> None:
    if not _NAME.fullmatch(name) or name in _OF_CONNECTIONS or (name == b"te" and value != b"trailers"):
        raise _malformed("a field's name")
    _check_value(value, bad_value)


def _check_value(value: bytes, bad: re.Pattern[bytes]) -> None:
    if bad.search(value):
        raise _malformed("a field's value")


def _check_hosts(hosts: list[bytes], authority: bytes) -> None:
    """8.3.1: what stands before this server and what runs in it must not see two different hosts."""
    if len(hosts) > 1 or (authority and hosts[0].lower() != authority.lower()):
        raise _malformed("host")


def _length(value: bytes | None) -> int | None:
    if value is None:
        return None
    if not value.isdigit() or len(value) > _MAX_DIGITS:
        raise _malformed("content-length")
    return int(value)


def _malformed(what: str) -> StreamFault:
    return StreamFault(ErrorCode.PROTOCOL_ERROR, f"a request is malformed: {what}")
