"""Messages in the bytes of a stream: one byte that says whether it is compressed, four for its length, the message."""

from __future__ import annotations

from collections import deque

import msgspec

from penstock.engines.errors import InvalidRequestError, PayloadTooLargeError

PREFIX_BYTES = 5
_MANY_PIECES = 64
_SMALL_PIECE = 512
"""Pieces that are smaller on average are joined: each takes some 50 bytes beside its own."""


class Message(msgspec.Struct, frozen=True, gc=False):
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

    def take(self) -> Message:
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
        return Message(whole[start:end], compressed)

    def _gather(self, count: int) -> None:
        """So many bytes from the start on lie in the first piece, without what has been taken before them."""
        if len(self._pieces[0]) - self._start < count:
            first = self._pieces.popleft()[self._start :]
            self._pieces = deque((b"".join((first, *self._pieces)),))
            self._start = 0
