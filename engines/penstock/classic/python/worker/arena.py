"""Shared memory for large tensors: one arena for each direction.

An arena is an anonymous file that the server and the model's process inherit from each other and map: it has no name in
any file system, and is gone when both are. Its sender allocates blocks; the receiver gives them back, in its next
message, when nothing reads them any more. It grows by whole segments.
"""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import insort
from typing import Any

import numpy as np

from .wire import Array, Buffer

_ALIGNMENT = 64
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
        number, offset = self._allocate(-(-size // _ALIGNMENT) * _ALIGNMENT)
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
        wanted = max(size, self._growth, self._size // 2) if self._segments else max(size, self._initial)
        wanted = -(-wanted // _PAGE) * _PAGE
        os.ftruncate(self._file, self._size + wanted)
        self._segments.append(_Segment(self._file, self._size, wanted))
        self._size += wanted
        self._announce.append(wanted)

    def announcement(self) -> list[int]:
        """Sizes of the segments that the receiver has not been told of."""
        found, self._announce = self._announce, []
        return found

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
        found = self._returned[:count]
        del self._returned[:count]  # others may have appended meanwhile
        return found
