"""Compressed bodies of inference requests and responses: gzip and deflate (RFC 9110: the zlib format)."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable

from penstock.engines.errors import InvalidRequestError, PayloadTooLargeError
from penstock.gateway.errors import HttpError

_LEVEL = 1
"""Tensors hardly get smaller with more effort, and it is spent while a request waits."""

_PIECE = 1 << 20
"""Bytes decompressed in one call. What is left at the end is too small to be counted."""

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
            headers=((b"accept-encoding", b"gzip, deflate"),),
        )
    return coding


def decompress(coding: bytes, body: bytes, limit: int, hold: Callable[[int], None] | None = None) -> bytes:
    """At most `limit` bytes, of which memory is only taken as they come. `hold` is told of each large piece.

    Raises PayloadTooLargeError, InvalidRequestError for data that is broken, cut off or followed by other data, and
    what `hold` raises.
    """
    stream = zlib.decompressobj(_WBITS[coding])
    pieces: list[bytes] = []
    size, rest = 0, body
    try:
        while piece := stream.decompress(rest, _PIECE):
            size += len(piece)
            if size > limit:
                raise PayloadTooLargeError(f"The decompressed request body is larger than {limit} bytes.")
            if hold is not None and len(piece) == _PIECE:
                hold(_PIECE)
            pieces.append(piece)
            rest = stream.unconsumed_tail
    except zlib.error:
        raise InvalidRequestError(f"the request body is no valid {coding.decode()} data") from None
    data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    if not stream.eof or stream.unused_data:
        raise InvalidRequestError(f"the request body is not exactly one complete {coding.decode()} stream")
    return data


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
