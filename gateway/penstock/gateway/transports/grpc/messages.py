"""Messages in the bytes of a stream, and their compression.

One byte says whether a message is compressed, and four its length; then it follows. `grpc-encoding` names the
compression, as the gRPC library has it.
"""

from __future__ import annotations

import zlib
from collections import deque
from functools import cache
from typing import Literal

import msgspec

from penstock.engines.errors import InvalidRequestError, PayloadTooLargeError, UnsupportedError
from penstock.gateway.requests.intake import WorkPool

PREFIX_BYTES = 5
_MANY_PIECES = 64
_SMALL_PIECE = 512
"""Pieces that are smaller on average are joined: each takes some 50 bytes beside its own."""


class GrpcMessage(msgspec.Struct, frozen=True, gc=False):
    data: bytes
    compressed: bool


def prefix(size: int, *, compressed: bool = False) -> bytes:
    return (b"\1" if compressed else b"\0") + size.to_bytes(4)


class MessageReader:
    """Keeps bytes as they come and cuts a message out of them when it is taken: thousands of tiny messages that nobody
    reads take no more memory than their bytes."""

    def __init__(self, most: int) -> None:
        """`most` bytes of a message."""
        self._most = most
        self._pieces: deque[bytes] = deque()
        self._start = 0
        """Of the next message in the first piece."""
        self._needed = 0
        """Bytes of the next message with its prefix; 0: not known."""
        self.size = 0
        """Bytes that have not been taken."""

    @property
    def missing(self) -> int:
        """Bytes that the next message still needs; 0 as long as its length is not known."""
        return max(0, self._needed - self.size)

    @property
    def whole(self) -> bool:
        """`ready` has found a whole message."""
        return 0 < self._needed <= self.size

    def feed(self, data: bytes) -> None:
        if data:
            pieces = self._pieces
            pieces.append(data)
            self.size += len(data)
            if len(pieces) > _MANY_PIECES and self.size < _SMALL_PIECE * len(pieces):
                self._gather(self.size)

    def clear(self) -> None:
        self._pieces.clear()
        self._start = self._needed = self.size = 0

    def ready(self) -> bool:
        """A whole message can be taken. Raises PayloadTooLargeError as soon as its length is known,
        InvalidRequestError."""
        if not self._needed and self.size >= PREFIX_BYTES:
            self._gather(PREFIX_BYTES)
            head, start = self._pieces[0], self._start
            if head[start] > 1:
                raise InvalidRequestError("The body of the call is not made of gRPC's messages.")
            size = int.from_bytes(head[start + 1 : start + PREFIX_BYTES])
            if size > self._most:
                raise PayloadTooLargeError(
                    f"Received message larger than max ({size} vs. {self._most}), which --http-max-input-size sets"
                )
            self._needed = PREFIX_BYTES + size
        return self.whole

    def take(self) -> GrpcMessage:
        """Only when one is ready."""
        compressed = self._pieces[0][self._start] == 1
        self._start += PREFIX_BYTES
        size = self._needed - PREFIX_BYTES
        self._gather(size)
        whole, start, end = self._pieces[0], self._start, self._start + size
        self.size -= self._needed
        self._needed = 0
        if end == len(whole):
            self._pieces.popleft()
            self._start = 0
        else:
            self._start = end
        return GrpcMessage(whole[start:end], compressed)

    def _gather(self, count: int) -> None:
        """So many bytes from the start on lie in the first piece, without what has been taken before them."""
        if len(self._pieces[0]) - self._start < count:
            first = self._pieces.popleft()[self._start :]
            self._pieces = deque((b"".join((first, *self._pieces)),))
            self._start = 0


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
