"""Messages between the server and a model's process, the tensors in them, and shared memory for large ones.

A message is a frame over a socket pair: the lengths of its two parts (12 bytes, little-endian), a JSON list and a tail
of raw bytes. The list begins with the kind of message, the blocks of the receiver's arena that the sender has done
with, and the sizes of the segments by which the sender's arena has grown. JSON because a model's own environment then
needs nothing that Python does not bring.

A tensor in the list is `[name, datatype, shape, offset, size]` with its bytes in the tail, or, when it is large,
`[name, datatype, shape, offset, size, segment]` with its bytes in a block of an arena.

There is one arena for each direction: an anonymous file that the server and the model's process inherit from each other
and map. It has no name in any file system, and is gone when both are. Its sender allocates blocks; the receiver gives
them back, in its next message, when nothing reads them any more. It grows by whole segments.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import weakref
from bisect import insort
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Buffer = Any
"""bytes, bytearray, memoryview or an array."""

FRAME = struct.Struct("<IQ")
INLINE_LIMIT = 32 * 1024
"""Bytes; a larger tensor goes through shared memory."""
_ALIGNMENT = 16
_PADDING = bytes(_ALIGNMENT)

encode: Callable[[Any], bytes]
decode: Callable[[Any], Any]

try:
    import msgspec
except ImportError:

    def encode(message: Any) -> bytes:
        return json.dumps(message, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")

    def decode(data: Any) -> Any:
        return json.loads(bytes(data))

else:
    encode, decode = msgspec.json.encode, msgspec.json.decode

NUMPY: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype("<u1"),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype("<i1"),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BF16": np.dtype("<u2"),
}
"""How a datatype's bytes are read; BF16 as its bits, for numpy has no such type."""


class Store(Protocol):
    """Where large tensors are put: the sender's arena."""

    def put(self, data: Buffer, size: int) -> tuple[int, int]: ...


class Packer:
    """Collects the tail of one message."""

    __slots__ = ("_store", "blocks", "parts", "size")

    def __init__(self, store: Store) -> None:
        self._store = store
        self.parts: list[Buffer] = []
        self.size = 0
        self.blocks: list[list[int]] = []
        """Of the store, as `[segment, offset]`. The receiver of the message gives them back."""

    def tensor(self, name: str, datatype: str, array: Array, encoded: bytes | None = None) -> list[Any]:
        """The tensor as the message's list shows it. `array` is C-contiguous; BF16 as bits. `encoded`: what
        `encode_strings` gives of it, where that is known."""
        if datatype == "BYTES":
            return [name, datatype, array.shape, *self.data(encode_strings(array) if encoded is None else encoded)]
        size = array.nbytes
        if size > INLINE_LIMIT:
            segment, offset = self._put(array, size)
            return [name, datatype, array.shape, offset, size, segment]
        offset = self.size
        if size:
            self.parts.append(array)
            self._pad(size)
        return [name, datatype, array.shape, offset, size]

    def data(self, data: bytes) -> list[int]:
        """Bytes: `[offset, size]` or `[offset, size, segment]`."""
        size = len(data)
        if size > INLINE_LIMIT:
            segment, offset = self._put(data, size)
            return [offset, size, segment]
        offset = self.size
        self.parts.append(data)
        self._pad(size)
        return [offset, size]

    def _put(self, data: Buffer, size: int) -> tuple[int, int]:
        segment, offset = self._store.put(data, size)
        self.blocks.append([segment, offset])
        return segment, offset

    def _pad(self, size: int) -> None:
        rest = -size % _ALIGNMENT
        if rest:
            self.parts.append(_PADDING[:rest])
        self.size += size + rest


def frame(message: list[Any], packer: Packer | None = None) -> bytes:
    """One message, ready to be sent."""
    head = encode(message)
    if packer is None or not packer.parts:
        return FRAME.pack(len(head), 0) + head
    return b"".join((FRAME.pack(len(head), packer.size), head, *packer.parts))


def encode_strings(array: Array) -> bytes:
    """A BYTES tensor: all lengths as 4-byte integers, then all elements. Text becomes UTF-8, other objects text."""
    items = array.ravel().tolist()
    if not all(type(item) is bytes for item in items):
        items = [item if isinstance(item, bytes) else str(item).encode() for item in items]
    lengths = np.fromiter(map(len, items), "<u4", len(items))
    return b"".join((lengths.tobytes(), *items))


def decode_strings(data: Buffer, shape: list[int]) -> Array:
    """The opposite: an object array of `bytes`."""
    array: Array = np.empty(shape, np.object_)
    count = array.size
    lengths = np.frombuffer(data, "<u4", count).tolist()
    whole = bytes(data)
    items, position = [], 4 * count
    for length in lengths:
        items.append(whole[position : position + length])
        position += length
    array.ravel()[:] = items  # ravel() of a fresh array is a view of it
    return array


_BLOCK_ALIGNMENT = 64
_PAGE = mmap.ALLOCATIONGRANULARITY
_KEPT = 64 * 1024 * 1024
"""Bytes; a larger segment gives its pages back to the system whenever it is empty. They have to be cleared again then,
which is little beside copying that much."""


class _Segment:
    """A mapped part of the file with its free ranges, in the order of their offsets."""

    def __init__(self, file: int, start: int, size: int) -> None:
        self.memory = mmap.mmap(file, size, offset=start)
        self.bytes = np.frombuffer(self.memory, np.uint8)
        self.size = size
        self.free = [(0, size)]
        self.taken: dict[int, int] = {}

    def allocate(self, size: int) -> int | None:
        """First fit."""
        for index, (offset, length) in enumerate(self.free):
            if length >= size:
                if length == size:
                    del self.free[index]
                else:
                    self.free[index] = (offset + size, length - size)
                self.taken[offset] = size
                return offset
        return None

    def release(self, offset: int) -> None:
        size = self.taken.pop(offset)
        insort(self.free, (offset, size))
        index = self.free.index((offset, size))
        if index + 1 < len(self.free) and offset + size == self.free[index + 1][0]:
            size += self.free.pop(index + 1)[1]
        if index and sum(self.free[index - 1]) == offset:
            self.free[index] = (self.free[index - 1][0], self.free[index - 1][1] + size)
            del self.free[index - 1]
        else:
            self.free[index] = (offset, size)
        if not self.taken and self.size > _KEPT:
            self.memory.madvise(mmap.MADV_REMOVE)


class SendArena:
    """The sender's end. Not safe for threads: the connection's lock guards it."""

    def __init__(self, file: int, initial: int, growth: int) -> None:
        """`initial` and `growth` in bytes: what it starts with, and the least by which it grows."""
        self._file = file
        self._initial = initial
        self._growth = growth
        self._size = 0
        self._segments: list[_Segment] = []
        self._announce: list[int] = []

    @property
    def size(self) -> int:
        """Bytes of shared memory that it has ever asked for."""
        return self._size

    @property
    def used(self) -> int:
        """Bytes in blocks that the receiver has not given back."""
        return sum(sum(segment.taken.values()) for segment in self._segments)

    def put(self, data: Buffer, size: int) -> tuple[int, int]:
        """Copies the data into a new block: its segment and offset. Raises OSError when the memory cannot be had."""
        number, offset, target = self.reserve(size)
        fill(target, data)
        return number, offset

    def reserve(self, size: int) -> tuple[int, int, Array]:
        """A new block, and its bytes, which are to be filled before the message leaves. Raises as `put` does."""
        number, offset = self._allocate(-(-size // _BLOCK_ALIGNMENT) * _BLOCK_ALIGNMENT)
        return number, offset, self._segments[number].bytes[offset : offset + size]

    def _allocate(self, size: int) -> tuple[int, int]:
        for number, segment in enumerate(self._segments):
            offset = segment.allocate(size)
            if offset is not None:
                return number, offset
        self._grow(size)
        self._segments[-1].allocate(size)
        return len(self._segments) - 1, 0

    def _grow(self, size: int) -> None:
        size_needed = max(size, self._growth, self._size // 2) if self._segments else max(size, self._initial)
        size_needed = -(-size_needed // _PAGE) * _PAGE
        os.ftruncate(self._file, self._size + size_needed)
        self._segments.append(_Segment(self._file, self._size, size_needed))
        self._size += size_needed
        self._announce.append(size_needed)

    def announcement(self) -> list[int]:
        """Sizes of the segments that the receiver has not been told of."""
        segments, self._announce = self._announce, []
        return segments

    def release(self, blocks: list[list[int]]) -> None:
        """Blocks that the receiver has given back, as `[segment, offset]`."""
        for segment, offset in blocks:
            self._segments[segment].release(offset)


def fill(target: Array, data: Buffer) -> None:
    """In any thread; others run meanwhile."""
    target[:] = data.reshape(-1).view(np.uint8) if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)


class Loan:
    """A block in the receiver's hands; given back when the last reference to it is gone."""

    __slots__ = ("_block", "_returned")

    def __init__(self, returned: list[list[int]], block: list[int]) -> None:
        self._returned = returned
        self._block = block

    def __del__(self) -> None:
        self._returned.append(self._block)


def _keep(loan: Loan) -> None:
    """Called with what an array has kept alive, when that array is gone."""


class ReceiveArena:
    """The receiver's end. Arrays over its blocks may live as long as anyone likes, in any thread."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._size = 0
        self._segments: list[Array] = []
        self._returned: list[list[int]] = []

    def grown(self, sizes: list[int]) -> None:
        for size in sizes:
            self._segments.append(np.frombuffer(mmap.mmap(self._file, size, offset=self._size), np.uint8))
            self._size += size

    def loan(self, segment: int, offset: int) -> Loan:
        return Loan(self._returned, [segment, offset])

    def array(self, loan: Loan, segment: int, offset: int, size: int) -> Array:
        """The block's bytes. The loan lasts as long as this array or any view of it."""
        view = self._segments[segment][offset : offset + size]
        # a view's base is always the array that owns or exports the memory, so the loan hangs on one of our own
        exported: Any = view
        anchor: Any = np.frombuffer(memoryview(exported), np.uint8)
        weakref.finalize(anchor, _keep, loan).atexit = False
        return anchor  # type: ignore[no-any-return]

    def returned(self) -> list[list[int]]:
        """Blocks to give back with the next message."""
        count = len(self._returned)
        places = self._returned[:count]
        del self._returned[:count]  # others may have appended meanwhile
        return places
