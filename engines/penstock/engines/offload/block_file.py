"""Blocks in two files: their contents, and an index of what each slot holds. Nothing in them is trusted."""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from penstock.kvcache import BlockHash

Contents = npt.NDArray[np.uint8]

_RECORD = struct.Struct("<8sQB31s16s")
"""Of a slot: magic, number of the write, length of the hash, the hash, checksum of the record before it and of the
contents."""
_MAGIC = b"PNSTKKV1"
_CHECKSUM_BYTES = 16

RECORD_BYTES = _RECORD.size


class BlockFile:
    """Slots of the same size. Read and written by calls, not mapped: a full disk is an error then, and not the end of
    the process.

    One thread may write while others read: a slot that is read while it is written has a wrong checksum, like one whose
    writing was cut off.
    """

    def __init__(self, contents: Path, index: Path, num_slots: int, block_bytes: int, key: bytes) -> None:
        """`key`: of the checksums. Slots from `num_slots` on, of larger files, are deleted. Raises OSError."""
        self._block_bytes = block_bytes
        self._key = key
        self._contents = _open(contents, num_slots * block_bytes)
        try:
            self._index = _open(index, num_slots * RECORD_BYTES)
        except OSError:
            os.close(self._contents)
            raise
        self._num_writes = 0

    def kept(self) -> list[tuple[BlockHash, int]]:
        """(hash, slot) of what the index names, in the order in which it was written. Raises OSError."""
        records = self.records(0, os.fstat(self._index).st_size // RECORD_BYTES)
        records.sort()
        self._num_writes = records[-1][0] if records else 0
        return [(block_hash, slot) for _, block_hash, slot in records]

    @property
    def num_writes(self) -> int:
        """The number of the newest write, once `kept` was called."""
        return self._num_writes

    def records(self, first: int, count: int) -> list[tuple[int, BlockHash, int]]:
        """(number of the write, hash, slot) of what the index names in these slots. Raises OSError."""
        records = []
        index = _read(self._index, np.empty(count * RECORD_BYTES, np.uint8), first * RECORD_BYTES).tobytes()
        for place in range(len(index) // RECORD_BYTES):
            magic, number, length, padded, _ = _RECORD.unpack_from(index, place * RECORD_BYTES)
            if magic == _MAGIC and 0 < length <= len(padded):
                records.append((number, padded[:length], first + place))
        return records

    def write(self, slot: int, block_hash: BlockHash, contents: Contents) -> None:
        """Raises OSError; what the slot held is lost then."""
        self._num_writes = (self._num_writes + 1) % 2**64
        record = _RECORD.pack(_MAGIC, self._num_writes, len(block_hash), block_hash, b"")[:-_CHECKSUM_BYTES]
        _write(self._contents, contents.data, slot * self._block_bytes)
        _write(self._index, memoryview(record + self._checksum(record, contents)), slot * RECORD_BYTES)

    def read(self, slot: int, block_hash: BlockHash) -> Contents | None:
        """The contents, [block bytes]; None: the slot does not hold what was written for this hash. Raises OSError."""
        record = _read(self._index, np.empty(RECORD_BYTES, np.uint8), slot * RECORD_BYTES).tobytes()
        if len(record) < RECORD_BYTES:
            return None
        magic, _, length, padded, checksum = _RECORD.unpack(record)
        if magic != _MAGIC or padded[:length] != block_hash:
            return None
        contents = _read(self._contents, np.empty(self._block_bytes, np.uint8), slot * self._block_bytes)
        if len(contents) < self._block_bytes or self._checksum(record[:-_CHECKSUM_BYTES], contents) != checksum:
            return None
        return contents

    def clear(self) -> None:
        """Raises OSError."""
        for descriptor in (self._index, self._contents):
            os.ftruncate(descriptor, 0)

    def close(self) -> None:
        os.close(self._contents)
        os.close(self._index)

    def _checksum(self, record: bytes, contents: Contents) -> bytes:
        digest = hashlib.blake2b(record, key=self._key, digest_size=_CHECKSUM_BYTES)
        digest.update(contents.data)
        return digest.digest()


def _open(path: Path, most_bytes: int) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if os.fstat(descriptor).st_size > most_bytes:
        os.ftruncate(descriptor, most_bytes)
    return descriptor


def _read(descriptor: int, into: Contents, offset: int) -> Contents:
    """As much of `into` as the file has from `offset` on."""
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into.data[done:]], offset + done)
        if not count:
            break
        done += count
    return into[:done]


def _write(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count
