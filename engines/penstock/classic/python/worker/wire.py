"""Messages between the server and a model's process, and the tensors in them.

A message is a frame over a socket pair: the lengths of its two parts (12 bytes, little-endian), a JSON list and a tail
of raw bytes. The list begins with the kind of message, the blocks of the receiver's arena that the sender has done
with, and the sizes of the segments by which the sender's arena has grown. JSON because a model's own environment then
needs nothing that Python does not bring.

A tensor in the list is `[name, datatype, shape, offset, size]` with its bytes in the tail, or, when it is large,
`[name, datatype, shape, offset, size, segment]` with its bytes in a block of shared memory.
"""

from __future__ import annotations

import json
import struct
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
    found: Array = np.empty(shape, np.object_)
    count = found.size
    lengths = np.frombuffer(data, "<u4", count).tolist()
    whole = bytes(data)
    items, position = [], 4 * count
    for length in lengths:
        items.append(whole[position : position + length])
        position += length
    found.ravel()[:] = items  # ravel() of a fresh array is a view of it
    return found
