"""Compression of messages: `grpc-encoding`, as the gRPC library has it."""

from __future__ import annotations

import zlib
from functools import cache
from typing import Literal

from penstock.engines.errors import InvalidRequestError, PayloadTooLargeError, UnsupportedError
from penstock.gateway.front.intake import WorkPool

Encoding = Literal["identity", "deflate", "gzip"]

ACCEPTED = b"identity, deflate, gzip"
_WINDOW_BITS = {"deflate": zlib.MAX_WBITS, "gzip": zlib.MAX_WBITS | 16}
_BY_STRENGTH: tuple[Encoding, ...] = ("gzip", "deflate")
"""As the library ranks them; a level names a place in those that the client takes."""
_LEVEL = 6
_SMALL_BYTES = 4 << 10
_SMALL_RESULT = 64 << 10
"""What takes no longer than waking a thread."""
_MAX_WAITING_BYTES = 256 << 20
"""Of messages that wait to be compressed or decompressed."""


def request_encoding(name: bytes | None) -> Encoding:
    """Raises UnsupportedError."""
    match name:
        case None | b"identity":
            return "identity"
        case b"gzip":
            return "gzip"
        case b"deflate":
            return "deflate"
    shown = name.decode("latin-1")[:64]
    raise UnsupportedError(f"Messages compressed by '{shown}' are not supported, only {ACCEPTED.decode()}.")


def answer_encoding(level: str, accepted: bytes | None) -> Encoding:
    """For the level that the operator has set: among those that the client says to accept."""
    if level == "none" or accepted is None:
        return "identity"
    names = {name.strip() for name in accepted.split(b",")}
    usable = [encoding for encoding in _BY_STRENGTH if encoding.encode() in names]
    if not usable:
        return "identity"
    return usable[{"low": 0, "medium": len(usable) // 2, "high": len(usable) - 1}[level]]


def compress(data: bytes, encoding: Encoding) -> bytes | None:
    """None where that would save nothing."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _WINDOW_BITS[encoding])
    packed = packer.compress(data) + packer.flush()
    return packed if len(packed) < len(data) else None


async def compressed(data: bytes, encoding: Encoding) -> bytes | None:
    """As `compress`; a large message in a thread. Raises OverloadedError."""
    if len(data) <= _SMALL_BYTES:
        return compress(data, encoding)
    return await _threads().run(len(data), compress, data, encoding)


async def decompressed(data: bytes, encoding: Encoding, most: int) -> bytes:
    """As `decompress`; in a thread if the message is large, or becomes large. Raises OverloadedError, too."""
    if len(data) <= _SMALL_BYTES:
        try:
            return decompress(data, encoding, min(most, _SMALL_RESULT))
        except PayloadTooLargeError:
            pass  # not so small, or too large altogether
    return await _threads().run(len(data), decompress, data, encoding, most)


@cache
def _threads() -> WorkPool:
    """Of their own: a few bytes can become many, and such messages hold up no other work."""
    return WorkPool("compressed messages", _MAX_WAITING_BYTES)


def decompress(data: bytes, encoding: Encoding, most: int) -> bytes:
    """Raises PayloadTooLargeError before more than `most` bytes have been made of it, InvalidRequestError."""
    if encoding == "identity":
        raise InvalidRequestError("A message is marked as compressed, but the call names no compression.")
    unpacker = zlib.decompressobj(_WINDOW_BITS[encoding])
    try:
        unpacked = unpacker.decompress(data, most + 1)
    except zlib.error:
        unpacked = None
    if unpacked is not None and len(unpacked) > most:
        raise PayloadTooLargeError(f"The message is larger than {most} bytes when it is decompressed.")
    if unpacked is None or not unpacker.eof or unpacker.unused_data:
        raise InvalidRequestError(f"A message cannot be decompressed by {encoding}.")
    return unpacked
