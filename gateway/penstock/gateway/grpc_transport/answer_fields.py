"""The header blocks of answers."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import quote

from penstock.gateway.grpc_transport.encodings import ACCEPTED, Encoding
from penstock.gateway.http2.hpack import Field, encode_fields

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
