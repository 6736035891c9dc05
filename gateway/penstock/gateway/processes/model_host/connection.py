"""One end of the border: messages and tensors over a unix socket and two arenas of shared memory.

What is sent in one turn of the event loop leaves in one write: the requests of all callers that a front has heard in a
wake-up, and the responses of a whole batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from msgspec import MsgspecError

from penstock.classic.python.link import BrokenFrameError, Copies, FrameSplitter, pack, unpack
from penstock.classic.python.worker.wire import Buffer, Packer, ReceiveArena, SendArena
from penstock.classic.tensors import Tensor, element_count
from penstock.engines.errors import EngineError, InvalidRequestError, PayloadTooLargeError
from penstock.gateway.processes.model_host.messages import Grown, Place, Returned, encode

logger = logging.getLogger(__name__)

# A frame is two lengths (16 bytes, little-endian), a head, which is a msgpack message, and a tail: the raw bytes of
# the small tensors in that message. Everything is padded to 16 bytes. So the elements of a tensor are aligned in
# memory wherever its frame stands in what has been received, and models need no copies of them.

_LENGTHS = struct.Struct("<QQ")
ALIGNMENT = _LENGTHS.size
_PADDING = bytes(ALIGNMENT)

MAX_HEAD_BYTES = 256 << 20
"""A head holds names, texts of parameters and where tensors lie, no tensors."""
MAX_TAIL_BYTES = 1 << 30
"""Each tensor in a tail is small (`wire.INLINE_LIMIT`), so there would have to be tens of thousands."""


def frame(head: bytes, parts: Sequence[Buffer] = (), tail_bytes: int = 0) -> bytes:
    """`parts` make up the tail; `tail_bytes` is their sum, a multiple of 16. Raises BrokenFrameError for a head that
    the other side would refuse."""
    if len(head) > MAX_HEAD_BYTES or tail_bytes > MAX_TAIL_BYTES:
        raise BrokenFrameError(f"a message of {len(head) + tail_bytes} bytes is too long")
    return b"".join((_LENGTHS.pack(len(head), tail_bytes), head, _PADDING[: -len(head) % ALIGNMENT], *parts))


def frame_splitter() -> FrameSplitter:
    return FrameSplitter(_LENGTHS, ALIGNMENT, MAX_HEAD_BYTES, MAX_TAIL_BYTES)


_ARENA_BYTES = 8 << 20
"""Of the arenas' first segment, and the least by which they grow. Memory is only taken as it is used."""
_SHARED = 6
"""Fields of the place of a tensor in shared memory: the last one is its segment."""
_LONG = 16 << 10
"""Bytes of a tail from which it is not copied to leave in one piece with the rest."""
_GIVE_BACK_SECONDS = 0.5
"""After which blocks go back to a sender that nothing else is said to."""


class Packed:
    """Tensors on their way into a message: small ones in its tail, large ones in blocks that are still to be filled."""

    __slots__ = ("copies", "packer", "places")

    def __init__(self, arena: SendArena) -> None:
        self.copies = Copies(arena)
        self.packer = Packer(self.copies)
        self.places: list[Place] = []

    @property
    def blocks(self) -> list[list[int]]:
        return [[place[5], place[3]] for place in self.places if len(place) == _SHARED]


def tensor_bytes(places: Iterable[Place]) -> int:
    return sum([int(place[4]) for place in places])


class HostConnection(asyncio.Protocol):
    """`on_message` gets every message that `decode` gives with its tail, and `on_lost` is called once, at the end. A
    message that makes no sense ends the connection: what it came with is dropped, and nothing behind it is read."""

    def __init__(
        self,
        receive_file: int,
        send_file: int,
        decode: Callable[[Buffer], Any],
        on_message: Callable[[Any, memoryview], None],
        on_lost: Callable[[], None],
    ) -> None:
        """The files, which are closed at the end, are those of the two arenas."""
        self._files: tuple[int, ...] = (receive_file, send_file)
        self._inbox = ReceiveArena(receive_file)
        self._outbox = SendArena(send_file, _ARENA_BYTES, _ARENA_BYTES)
        self._decode = decode
        self._on_message = on_message
        self._on_lost = on_lost
        self._reader = frame_splitter()
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self.ended: asyncio.Future[None] = self._loop.create_future()
        """Done at the end, after `on_lost`."""
        self._out: list[Buffer] = []
        self._has_long = False
        self._lent = 0
        """Blocks that are still read here."""
        self._giving_back: asyncio.TimerHandle | None = None

    async def open(self, sock: socket.socket) -> None:
        """Before the first `send`. Raises OSError."""
        try:
            await self._loop.create_unix_connection(lambda: self, sock=sock)
        except BaseException:
            sock.close()
            self._close_files()
            raise

    # Receiving

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        try:
            for head, tail in self._reader.feed(data):
                message = self._decode(head)
                if type(message) is Returned:
                    self._outbox.release([list(block) for block in message.blocks])
                elif type(message) is Grown:
                    self._inbox.grown(message.segments)
                else:
                    self._on_message(message, tail)
        except (BrokenFrameError, MsgspecError, ValueError, LookupError, TypeError, OSError) as error:
            logger.error("front protocol error", exc_info=error)
            self.close()

    def take(self, places: Iterable[Place], tail: memoryview) -> list[Tensor]:
        """The tensors of a message, without a copy (BYTES excepted). Raises ValueError, LookupError and TypeError for
        places that cannot be."""
        self.lend(places)
        return self.read(places, tail)

    def lend(self, places: Iterable[Place]) -> None:
        """Before `read`, on the event loop."""
        for place in places:
            if len(place) == _SHARED:
                self._lend()

    def read(self, places: Iterable[Place], tail: memoryview) -> list[Tensor]:
        """`take` without the part that needs the event loop: in any thread."""
        return [self._read(place, tail) for place in places]

    def _read(self, place: Place, tail: memoryview) -> Tensor:
        if place[1] == "BYTES":  # numpy compares the sizes of all others
            try:
                count = element_count(place[2], place[0])
            except InvalidRequestError as error:
                raise ValueError(error.message) from None
            if 4 * count > place[4]:
                raise ValueError(f"a tensor of {count} strings cannot have {place[4]} bytes")
        return unpack(place, tail, self._inbox)

    def drop(self, places: Iterable[Place]) -> None:
        """Gives back what nobody reads."""
        for place in places:
            if len(place) == _SHARED:
                self._lend()
                self._inbox.loan(place[5], place[3])

    def _lend(self) -> None:
        self._lent += 1
        if self._giving_back is None:
            self._giving_back = self._loop.call_later(_GIVE_BACK_SECONDS, self._give_back)

    def _give_back(self) -> None:
        self._giving_back = None
        if not self._out:
            self._flush()
        if self._lent > 0 and self._transport is not None:
            self._giving_back = self._loop.call_later(_GIVE_BACK_SECONDS, self._give_back)

    # Sending

    def pack(self, tensors: Iterable[Tensor]) -> Packed:
        """To be filled, and then sent. Raises EngineError when there is no shared memory for them."""
        packed = Packed(self._outbox)
        try:
            for tensor in tensors:
                packed.places.append(pack(packed.packer, tensor))
        except OSError as error:
            self._outbox.release(packed.blocks)
            raise EngineError(f"there is no shared memory for a tensor: {error.strerror}") from None
        return packed

    def release(self, packed: Packed) -> None:
        """It is filled, and is not to be sent after all."""
        self._outbox.release(packed.blocks)

    async def fill(self, packed: Packed) -> None:
        """In a thread, where that takes long. When it is cancelled, the blocks are free once the thread is done."""
        filling = asyncio.ensure_future(packed.copies.written())
        try:
            await asyncio.shield(filling)
        except asyncio.CancelledError:
            filling.add_done_callback(lambda _: self.release(packed))
            raise

    def send(self, message: Any, packed: Packed | None = None, *, tail: Buffer = b"") -> None:
        """Nothing happens when the other side has gone. `tail`: bytes behind the message; the other side also gets the
        padding. Raises PayloadTooLargeError."""
        if self._transport is None:
            return
        try:
            head = encode(message)
            if tail:
                data = frame(head, (), len(tail) + -len(tail) % ALIGNMENT)
            elif packed is None:
                data = frame(head)
            else:
                data = frame(head, packed.packer.parts, packed.packer.size)
        except BrokenFrameError as error:
            if packed is not None:
                self.release(packed)
            raise PayloadTooLargeError(str(error)) from None
        if not self._out:
            self._loop.call_soon(self._flush)
        grown = self._outbox.announcement()
        if grown:
            self._out.append(frame(encode(Grown(grown))))
        self._out.append(data)
        if tail:
            self._out += (tail, _PADDING[: -len(tail) % ALIGNMENT])
            self._has_long = self._has_long or len(tail) > _LONG

    def _flush(self) -> None:
        returned = self._inbox.returned()
        if returned:
            self._lent -= len(returned)
            self._out.append(frame(encode(Returned([(segment, offset) for segment, offset in returned]))))
        out, self._out = self._out, []
        has_long, self._has_long = self._has_long, False
        if self._transport is not None and has_long:
            self._transport.writelines(out)
        elif self._transport is not None and out:
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))

    # The end

    @property
    def closed(self) -> bool:
        return self._transport is None

    async def end(self) -> None:
        """Closes it when what has been sent has left."""
        self._flush()
        if self._transport is not None:
            self._transport.close()
            await self.ended

    def close(self) -> None:
        """At once."""
        if self._transport is not None:
            with contextlib.suppress(OSError):
                self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._out.clear()
        if self._giving_back is not None:
            self._giving_back.cancel()
        self._close_files()
        self._on_lost()
        self.ended.set_result(None)

    def _close_files(self) -> None:
        files, self._files = self._files, ()
        for file in files:
            os.close(file)  # what is mapped stays mapped
