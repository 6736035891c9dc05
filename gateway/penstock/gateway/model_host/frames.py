"""Frames of the border between a front and the model host: the bytes of messages, apart from any socket.

A frame is two lengths (16 bytes, little-endian), a head, which is a msgpack message, and a tail: the raw bytes of the
small tensors in that message. Everything is padded to 16 bytes. So the elements of a tensor are aligned in memory
wherever its frame stands in what has been received, and models need no copies of them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from penstock.classic.python.worker.wire import Buffer

_LENGTHS = struct.Struct("<QQ")
ALIGNMENT = _LENGTHS.size
_PADDING = bytes(ALIGNMENT)

MAX_HEAD_BYTES = 64 << 20
"""A head holds names, texts of parameters and where tensors lie, no tensors."""
MAX_TAIL_BYTES = 1 << 30
"""Each tensor in a tail is small (`wire.INLINE_LIMIT`), so there would have to be tens of thousands."""


class BrokenFrameError(ValueError):
    """What was received is no frame; nothing behind it can be read either."""


def frame(head: bytes, parts: Sequence[Buffer] = (), tail_bytes: int = 0) -> bytes:
    """`parts` make up the tail; `tail_bytes` is their sum, a multiple of 16. Raises BrokenFrameError for a head that
    the other side would refuse."""
    if len(head) > MAX_HEAD_BYTES or tail_bytes > MAX_TAIL_BYTES:
        raise BrokenFrameError(f"a message of {len(head) + tail_bytes} bytes is too long")
    return b"".join((_LENGTHS.pack(len(head), tail_bytes), head, _PADDING[: -len(head) % ALIGNMENT], *parts))


class FrameReader:
    """Cuts received bytes into frames."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._needed = ALIGNMENT

    def feed(self, data: bytes) -> list[tuple[memoryview, memoryview]]:
        """Head and tail of each frame that is complete now. They are views: a tail stays usable as long as it is
        referenced. Raises BrokenFrameError."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return []
            data = bytes(self._rest)
            self._rest.clear()
        found = []
        view = memoryview(data)
        position, end = 0, len(data)
        self._needed = ALIGNMENT
        while end - position >= ALIGNMENT:
            head, tail = _LENGTHS.unpack_from(data, position)
            if head > MAX_HEAD_BYTES or tail > MAX_TAIL_BYTES or tail % ALIGNMENT:
                raise BrokenFrameError(f"a frame claims to have a head of {head} bytes and a tail of {tail} bytes")
            size = ALIGNMENT + head + -head % ALIGNMENT + tail
            if position + size > end:
                self._needed = size
                break
            start = position + ALIGNMENT
            position += size
            found.append((view[start : start + head], view[position - tail : position]))
        self._rest += view[position:]
        return found
