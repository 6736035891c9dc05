"""Heads of calls and of their answers: metadata, deadlines, encodings, statuses."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from urllib.parse import quote

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.transports.grpc.messages import ACCEPTED, Encoding, request_encoding
from penstock.gateway.transports.http2.heads import RequestHead
from penstock.gateway.transports.http2.hpack import Field, encode_fields

Metadata = tuple[tuple[str, str | bytes], ...]

_TIMEOUT = re.compile(rb"(\d{1,8})([HMSmun])")
_SECONDS = {b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9}
_OF_PROTOCOL = frozenset(
    {b"te", b"content-type", b"content-length", b"grpc-encoding", b"grpc-timeout", b"grpc-accept-encoding"}
)
"""Fields that handlers do not see."""
_BINARY = b"-bin"
_MAX_VALUES = 1024
"""More than fields can be in a list of 16 KiB; but a binary one may have thousands of values, separated by commas."""


@dataclass(frozen=True, slots=True)
class CallHead:
    path: str
    metadata: Metadata
    timeout: float | None
    """Seconds."""
    encoding: Encoding
    accepted: bytes | None
    """Encodings that answers may have."""


def call_head(head: RequestHead) -> CallHead:
    """Raises InvalidRequestError, UnsupportedError."""
    own = {name: value for name, value in head.fields if name in _OF_PROTOCOL}
    metadata = tuple(islice(_metadata(head.fields), _MAX_VALUES + 1))
    if len(metadata) > _MAX_VALUES:
        raise InvalidRequestError(f"The call has more than {_MAX_VALUES} values of metadata.")
    return CallHead(
        head.path.decode("latin-1"),
        metadata,
        _timeout(own.get(b"grpc-timeout")),
        request_encoding(own.get(b"grpc-encoding")),
        own.get(b"grpc-accept-encoding"),
    )


def _metadata(fields: Iterable[Field]) -> Iterable[tuple[str, str | bytes]]:
    for name, value in fields:
        if name in _OF_PROTOCOL:
            continue
        key = name.decode("ascii")
        if name.endswith(_BINARY):
            for part in value.split(b","):
                yield key, _binary(key, part.strip())
        else:
            yield key, _text(value)


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


def _binary(key: str, value: bytes) -> bytes:
    """Base64, whose padding may be left out."""
    try:
        return base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except binascii.Error:
        raise InvalidRequestError(f"The metadata '{key[:64]}' is not base64.") from None


def _timeout(value: bytes | None) -> float | None:
    if value is None:
        return None
    match = _TIMEOUT.fullmatch(value)
    if match is None:
        raise InvalidRequestError("grpc-timeout is malformed.")
    return int(match[1]) * _SECONDS[match[2]]


_START = ((b":status", b"200"), (b"content-type", b"application/grpc"), (b"grpc-accept-encoding", ACCEPTED))
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")
"""What a status's message keeps; all else is written as %XX of its UTF-8 bytes."""
_MAX_MESSAGE_BYTES = 4 << 10
"""As it is written. Clients of the gRPC library refuse answers with more than 8 KiB of metadata, and then show nothing
of the status."""
_OUTER_SPACE = re.compile(rb"^ | $")


@lru_cache
def start_block(encoding: Encoding) -> bytes:
    """In front of the first message."""
    fields: tuple[Field, ...] = _START
    if encoding != "identity":
        fields = (*fields, (b"grpc-encoding", encoding.encode()))
    return encode_fields(fields)


def end_block(code: int, details: str, metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    """Trailers."""
    block = _status_block(code)
    if details:
        block += encode_fields([(b"grpc-message", _message(details))])
    return block + encode_fields([_field(name, value) for name, value in metadata])


def _message(details: str) -> bytes:
    text = details[:_MAX_MESSAGE_BYTES]
    written = _quoted(text)
    while len(written) > _MAX_MESSAGE_BYTES:
        text = text[: len(text) * _MAX_MESSAGE_BYTES // len(written)]
        written = _quoted(text)
    return written if len(text) == len(details) else written + b"..."


def _quoted(text: str) -> bytes:
    """Spaces at the ends are no part of a field (RFC 9113, 8.2.1), so they are written like other characters there."""
    return _OUTER_SPACE.sub(b"%20", quote(text, safe=_PRINTABLE, errors="replace").encode())


@lru_cache
def _status_block(code: int) -> bytes:
    return encode_fields([(b"grpc-status", b"%d" % code)])


def _field(name: str, value: str | bytes) -> Field:
    if isinstance(value, bytes):
        return name.encode(), base64.b64encode(value).rstrip(b"=")
    return name.encode(), value.encode()


@lru_cache
def refusal_block(status: int) -> bytes:
    """For what is not gRPC: a status of HTTP, and nothing else."""
    return encode_fields([(b":status", b"%d" % status), (b"content-length", b"0")])
