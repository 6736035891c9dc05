"""What the headers of a call say."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from penstock.engines.errors import InvalidRequestError
from penstock.gateway.grpc_transport.encodings import Encoding, request_encoding
from penstock.gateway.http2.heads import RequestHead
from penstock.gateway.http2.hpack import Field

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


def is_grpc(head: RequestHead) -> bool:
    kind = next((value for name, value in head.fields if name == b"content-type"), b"")
    return kind == b"application/grpc" or kind.startswith((b"application/grpc+", b"application/grpc;"))


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
    found = _TIMEOUT.fullmatch(value)
    if found is None:
        raise InvalidRequestError("grpc-timeout is malformed.")
    return int(found[1]) * _SECONDS[found[2]]
