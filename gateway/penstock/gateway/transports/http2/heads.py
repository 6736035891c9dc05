"""Heads of requests: what their fields may be (RFC 9113, 8.2 and 8.3), and the events of a connection."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec

from penstock.gateway.transports.http2.frames import Http2ErrorCode, StreamFault
from penstock.gateway.transports.http2.hpack import FIELD_OVERHEAD, Field, HpackDecoder

K = TypeVar("K")
V = TypeVar("V")

_MAX_BYTES = 8 << 10
"""Of heads, as they count against the limit of a header list; in memory they take some times as much. A client has a
few kinds of requests, of less than a kilobyte each. It must not be able to make every connection hold much."""


class Recent(Generic[K, V]):
    """The latest values; the oldest ones go when all together are too large."""

    def __init__(self) -> None:
        self._kept: dict[K, tuple[V, int]] = {}
        self._bytes = 0

    def get(self, key: K) -> V | None:
        entry = self._kept.get(key)
        return None if entry is None else entry[0]

    def keep(self, key: K, value: V, size: int) -> None:
        """The key is new. What is too large alone is not kept."""
        if size > _MAX_BYTES:
            return
        self._bytes += size
        while self._bytes > _MAX_BYTES:
            oldest = next(iter(self._kept))
            self._bytes -= self._kept.pop(oldest)[1]
        self._kept[key] = value, size

    def clear(self) -> None:
        self._kept.clear()
        self._bytes = 0


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


def is_grpc(head: RequestHead) -> bool:
    kind = next((value for name, value in head.fields if name == b"content-type"), b"").lower()
    return kind == b"application/grpc" or kind.startswith((b"application/grpc+", b"application/grpc;"))


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
    return StreamFault(Http2ErrorCode.PROTOCOL_ERROR, f"a request is malformed: {what}")


_MAX_BLOCK_BYTES = 512


class HeadReader:
    """A client's second request of a kind is usually a block of indexes, and that block then comes with every request.

    What such a block means depends on the dynamic table. A block may be remembered if it has not changed the table, and
    everything that is remembered is forgotten as soon as another block does: so the table is the same at every look-up
    as it was when the block was decoded.
    """

    def __init__(self, max_list_bytes: int, most_list_bytes: int, *, spaces: bool = False) -> None:
        """`spaces`: whether values may begin and end with them."""
        self._decoder = HpackDecoder(most_list_bytes)
        self._max_list_bytes = max_list_bytes
        self._spaces = spaces
        self._seen: Recent[bytes, RequestHead] = Recent()

    def fields(self, block: bytes) -> list[Field]:
        """Of trailers, or of what is ignored. Raises ConnectionFault."""
        before = self._decoder.changes
        try:
            return self._decoder.decode(block)
        finally:
            if self._decoder.changes != before:
                self._seen.clear()

    def head(self, block: bytes) -> RequestHead:
        """Raises ConnectionFault, and StreamFault for a head that is malformed."""
        known = self._seen.get(block)
        if known is not None:
            return known
        before = self._decoder.changes
        head = request_head(self.fields(block), self._max_list_bytes, spaces=self._spaces)
        if self._decoder.changes == before and len(block) <= _MAX_BLOCK_BYTES:
            self._seen.keep(block, head, head.size)
        return head


class RequestStarted(msgspec.Struct, frozen=True, gc=False):
    """The headers of a request are there."""

    stream_id: int
    head: RequestHead
    ended: bool
    """Without a body."""


class DataReceived(msgspec.Struct, frozen=True, gc=False):
    """A piece of a request's body. `credit` has to be called for it when it is used up."""

    stream_id: int
    data: bytes
    ended: bool
    """The body ends with it."""


class StreamReset(msgspec.Struct, frozen=True, gc=False):
    """A stream has ended before its time: by the client, or for a fault of the client's."""

    stream_id: int
    code: int


class PingAnswered(msgspec.Struct, frozen=True, gc=False):
    payload: bytes


class ClientLeaving(msgspec.Struct, frozen=True, gc=False):
    """The client opens no more streams."""

    code: int


class ConnectionFailed(msgspec.Struct, frozen=True, gc=False):
    """The client broke a rule: what is queued tells it so, and nothing more is received."""

    code: Http2ErrorCode
    text: str


StreamEvent = RequestStarted | DataReceived | StreamReset
Event = StreamEvent | PingAnswered | ClientLeaving | ConnectionFailed
