"""Compressed bodies of requests and responses: gzip and deflate (RFC 9110, 8.4.1)."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator

from penstock.engines.errors import InvalidRequestError, PayloadTooLargeError
from penstock.gateway.errors import HttpError
from penstock.gateway.requests.intake import SMALL_BODY

_LEVEL = 1
"""Tensors hardly get smaller with more effort, and it is spent while a request waits."""

_PIECE = 1 << 20
"""Most bytes that one call decompresses."""
_FED = 64 << 10
"""Bytes of compressed data that are fed together: zlib copies what it leaves of them."""
_MOST_MEMBERS = 4096
"""Of gzip data. Empty ones cost twenty bytes each, and far more time than that."""

_WBITS = {b"gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
_QUALITY = re.compile(rb"q=(0(?:\.[0-9]{0,3})?|1(?:\.0{0,3})?)")


def content_coding(header: bytes | None) -> bytes:
    """`gzip`, `deflate` or nothing, of a Content-Encoding header. Raises HttpError 415."""
    coding = (header or b"").strip().lower()
    if coding in (b"", b"identity"):
        return b""
    if coding not in _WBITS:
        raise HttpError(
            415,
            "Unsupported content-encoding, only 'gzip', 'deflate' and 'identity' are supported.",
            code="unsupported_encoding",
            headers=((b"accept-encoding", b"gzip, deflate"),),
        )
    return coding


def decompress(coding: bytes, body: bytes, limit: int, hold: Callable[[int], None] | None = None) -> bytes:
    """At most `limit` bytes, of which memory is only taken as they come. `hold` is told of what goes beyond a small
    body, also as it comes.

    Raises PayloadTooLargeError, InvalidRequestError for data that is broken, cut off or followed by other data, and
    what `hold` raises.
    """
    pieces: list[bytes] = []
    size, held = 0, SMALL_BODY
    try:
        for piece in _pieces(coding, body, min(_PIECE, limit + 1)):
            size += len(piece)
            if size > limit:
                raise PayloadTooLargeError(f"The decompressed request body is larger than {limit} bytes.")
            if hold is not None and size > held:
                hold(size - held)
                held = size
            pieces.append(piece)
    except zlib.error:
        raise InvalidRequestError(f"the request body is no valid {coding.decode()} data") from None
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _pieces(coding: bytes, body: bytes, most: int) -> Iterator[bytes]:
    """None is empty or has more than `most` bytes. Raises zlib.error, InvalidRequestError."""
    stream, members = zlib.decompressobj(_WBITS[coding]), 1
    for begin in range(0, len(body), _FED):
        rest = body[begin : begin + _FED]
        while rest:
            if stream.eof:  # gzip data may have several members (RFC 1952, 2.2)
                members += 1
                if coding != b"gzip":
                    raise _not_one(coding)
                if members > _MOST_MEMBERS:
                    raise InvalidRequestError(f"the request body has more than {_MOST_MEMBERS} gzip members")
                stream = zlib.decompressobj(_WBITS[coding])
            piece = stream.decompress(rest, most)
            if piece:
                yield piece
            rest = stream.unused_data if stream.eof else stream.unconsumed_tail
    if not stream.eof:  # checksums are last, so no output can be left behind
        raise _not_one(coding)


def _not_one(coding: bytes) -> InvalidRequestError:
    return InvalidRequestError(f"the request body is not exactly one complete {coding.decode()} stream")


def accepted_coding(header: bytes | None) -> bytes:
    """What an Accept-Encoding header prefers: `gzip`, `deflate` or nothing. Of equals gzip wins."""
    if not header:
        return b""
    weights = dict(_weighted(item) for item in header.lower().split(b",")[:16])
    best = max((b"gzip", b"deflate"), key=lambda coding: weights.get(coding, 0.0))
    weight = weights.get(best, 0.0)
    return best if weight > 0 and weight >= weights.get(b"identity", 0.0) else b""


def _weighted(item: bytes) -> tuple[bytes, float]:
    coding, _, parameter = item.partition(b";")
    if not parameter:
        return coding.strip(), 1.0
    quality = _QUALITY.fullmatch(parameter.strip())
    return coding.strip(), float(quality[1]) if quality else 0.0


def compress(coding: bytes, parts: list[bytes]) -> bytes:
    stream = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WBITS[coding])
    return b"".join([*map(stream.compress, parts), stream.flush()])
