"""The server's end of a model process's socket, the tensors that go through it, and the errors of both sides."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any, cast

import ml_dtypes
import numpy as np

from penstock.classic.messages import InferResponse
from penstock.classic.python.worker.errors import ErrorCode
from penstock.classic.python.worker.wire import (
    FRAME,
    NUMPY,
    Array,
    Buffer,
    Packer,
    ReceiveArena,
    SendArena,
    decode,
    decode_strings,
    fill,
    frame,
)
from penstock.classic.tensors import Tensor
from penstock.engines import errors as tree
from penstock.engines.errors import PenstockError


class ArenaFiles:
    """`down`: what the server writes; `up`: what the model's process writes. They have no name in /dev/shm, do not
    count against its size, and end with the last process that maps them."""

    def __init__(self, prefix: str) -> None:
        self.down = os.memfd_create(f"{prefix}-down")
        try:
            self.up = os.memfd_create(f"{prefix}-up")
        except OSError:
            os.close(self.down)
            raise
        self._open = True

    def close(self) -> None:
        if self._open:
            self._open = False
            os.close(self.down)
            os.close(self.up)


OnMessage = Callable[[str, list[Any], memoryview], None]


def _ignore(kind: str, fields: list[Any], tail: memoryview) -> None:
    """For what comes after the end."""


class BrokenFrameError(ValueError):
    """What was received is no frame; nothing behind it can be read either."""


class FrameSplitter:
    """Cuts received bytes into frames: the lengths of head and tail, and these two."""

    def __init__(
        self, lengths: struct.Struct, alignment: int = 1, most_head: int = sys.maxsize, most_tail: int = sys.maxsize
    ) -> None:
        """The lengths and the heads are padded to `alignment` bytes; tails have multiples of it."""
        self._lengths = lengths
        self._alignment = alignment
        self._most_head = most_head
        self._most_tail = most_tail
        self._rest = bytearray()
        self._needed = lengths.size

    def feed(self, data: bytes | bytearray) -> list[tuple[memoryview, memoryview]]:
        """Head and tail of each frame that is complete now. They are views: a tail stays usable as long as it is
        referenced. Raises BrokenFrameError."""
        if self._rest:
            self._rest += data
            if len(self._rest) < self._needed:
                return []
            data, self._rest = self._rest, bytearray()
        frames = []
        view = memoryview(data).toreadonly()
        position, end = 0, len(data)
        lengths, alignment = self._lengths, self._alignment
        self._needed = lengths.size
        while end - position >= lengths.size:
            head, tail = lengths.unpack_from(data, position)
            if head > self._most_head or tail > self._most_tail or tail % alignment:
                raise BrokenFrameError(f"a frame claims to have a head of {head} bytes and a tail of {tail} bytes")
            size = lengths.size + head + -head % alignment + tail
            if position + size > end:
                self._needed = size
                break
            start = position + lengths.size
            position += size
            frames.append((view[start : start + head], view[position - tail : position]))
        self._rest += view[position:]
        return frames


class StubLink(asyncio.Protocol):
    """Messages both ways. `on_message` gets the kind, the fields and the tail of each as it comes; the arrays over a
    tail are read-only."""

    def __init__(self, files: ArenaFiles, initial: int, growth: int, on_message: OnMessage) -> None:
        self.inbox = ReceiveArena(files.up)
        self.outbox = SendArena(files.down, initial, growth)
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._files = files
        self._on_message = on_message
        self._reader = FrameSplitter(FRAME)
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def connect(
        cls, sock: socket.socket, files: ArenaFiles, sizes: tuple[int, int], on_message: OnMessage
    ) -> StubLink:
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: cls(files, *sizes, on_message), sock=sock)
        return link

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        for head, tail in self._reader.feed(data):
            kind, returned, grown, *fields = decode(head)
            if returned:
                self.outbox.release(returned)
            if grown:
                self.inbox.grown(grown)
            self._on_message(kind, fields, tail)

    def connection_lost(self, error: Exception | None) -> None:
        self._files.close()  # what is mapped stays mapped
        self._transport = None
        self._on_message = _ignore
        if not self.closed.done():
            self.closed.set_result(None)

    def send(self, kind: str, fields: list[Any], packer: Packer | None = None) -> None:
        """Nothing happens when the process has gone."""
        if self._transport is not None:
            message = [kind, self.inbox.returned(), self.outbox.announcement(), *fields]
            self._transport.write(frame(message, packer))

    def close(self) -> None:
        if self._transport is not None:
            with contextlib.suppress(OSError):
                self._transport.abort()


_AT_ONCE = 1024 * 1024
"""Bytes that are copied on the loop itself, in some tenths of a millisecond; more goes to a thread."""


class Copies:
    """A Packer's store: blocks are reserved while a message is packed, and filled before it is sent."""

    def __init__(self, arena: SendArena) -> None:
        self._arena = arena
        self._waiting: list[tuple[Array, Buffer]] = []
        self._size = 0

    def put(self, data: Buffer, size: int) -> tuple[int, int]:
        segment, offset, target = self._arena.reserve(size)
        self._waiting.append((target, data))
        self._size += size
        return segment, offset

    @property
    def pending(self) -> bool:
        return bool(self._waiting)

    @property
    def are_long(self) -> bool:
        """Made on the loop, they would hold it up."""
        return self._size > _AT_ONCE

    async def written(self) -> None:
        if self.are_long:
            await asyncio.to_thread(self.make)
        else:
            self.make()

    def make(self) -> None:
        for target, data in self._waiting:
            fill(target, data)
        self._waiting.clear()


_CLASSES: dict[int, type[PenstockError]] = {
    ErrorCode.UNKNOWN: tree.UnknownError,
    ErrorCode.INTERNAL: tree.EngineError,
    ErrorCode.NOT_FOUND: tree.NotFoundError,
    ErrorCode.INVALID_ARG: tree.InvalidRequestError,
    ErrorCode.UNAVAILABLE: tree.OverloadedError,
    ErrorCode.UNSUPPORTED: tree.UnsupportedError,
    ErrorCode.ALREADY_EXISTS: tree.AlreadyExistsError,
    ErrorCode.CANCELLED: tree.CancelledError,
}

# from the special to the general: the first class that fits is the one
_CODES: tuple[tuple[type[PenstockError], ErrorCode], ...] = (
    (tree.UnsupportedError, ErrorCode.UNSUPPORTED),
    (tree.AlreadyExistsError, ErrorCode.ALREADY_EXISTS),
    (tree.NotFoundError, ErrorCode.NOT_FOUND),
    (tree.InvalidRequestError, ErrorCode.INVALID_ARG),
    (tree.OverloadedError, ErrorCode.UNAVAILABLE),
    (tree.EngineDeadError, ErrorCode.UNAVAILABLE),
    (tree.DeadlineExceededError, ErrorCode.UNAVAILABLE),
    (tree.CancelledError, ErrorCode.CANCELLED),
    (tree.UnknownError, ErrorCode.UNKNOWN),
)


def to_error(fields: list[object]) -> PenstockError:
    """Our error for `[code, message]` of a response."""
    code, message = fields
    return _CLASSES.get(int(str(code)), tree.EngineError)(str(message))


def to_fields(error: Exception) -> list[object]:
    """`[code, message]` for an error of ours; nothing of any other exception but that it happened."""
    if not isinstance(error, PenstockError):
        return [int(ErrorCode.INTERNAL), "The server had an error while processing the request."]
    code = next((code for cls, code in _CODES if isinstance(error, cls)), ErrorCode.INTERNAL)
    return [int(code), error.message]


def pack(packer: Packer, tensor: Tensor, encoded: bytes | None = None) -> list[Any]:
    """`encoded` as for `Packer.tensor`."""
    array = tensor.array
    if not array.flags.c_contiguous:
        array = np.ascontiguousarray(array)
    if tensor.datatype == "BF16":
        array = array.view(np.uint16)
    return packer.tensor(tensor.name, tensor.datatype, array, encoded)


def unpack(place: list[Any], tail: memoryview, arena: ReceiveArena) -> Tensor:
    """Over the message's tail or the shared memory, without a copy; BYTES are decoded."""
    if len(place) == 5:
        name, datatype, shape, offset, size = place
        if datatype == "BYTES":
            return Tensor(name, datatype, decode_strings(tail[offset : offset + size], shape))
        array: Array = np.ndarray(shape, NUMPY[datatype], tail, offset)
    else:
        name, datatype, shape, offset, size, segment = place
        block = arena.array(arena.loan(segment, offset), segment, offset, size)
        if datatype == "BYTES":
            return Tensor(name, datatype, decode_strings(block, shape))
        array = block.view(NUMPY[datatype]).reshape(shape)
    return Tensor(name, datatype, array.view(ml_dtypes.bfloat16) if datatype == "BF16" else array)


def pack_response(packer: Packer, response: InferResponse) -> list[Any]:
    if response.error is not None:
        return [None, None, to_fields(response.error)]
    outputs = None if response.outputs is None else [pack(packer, tensor) for tensor in response.outputs]
    return [outputs, response.parameters or None, None]


def unpack_response(fields: list[Any] | None, final: bool, tail: memoryview, arena: ReceiveArena) -> InferResponse:
    """`fields` as worker/response.py describes them; None: nothing but the final flag."""
    if fields is None:
        return InferResponse(None, final=final)
    outputs, parameters, error = fields
    if error is not None:
        return InferResponse(None, error=to_error(error), final=final)
    return InferResponse([unpack(place, tail, arena) for place in outputs], parameters or {}, final=final)
