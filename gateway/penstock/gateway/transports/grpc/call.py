"""Calls: what their streams bring to handlers, and what handlers answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from penstock.engines.errors import DeadlineExceededError, InvalidRequestError, PenstockError
from penstock.gateway.errors import public_message, wire_shape
from penstock.gateway.requests.intake import ConnectionShare
from penstock.gateway.transports.grpc.heads import CallHead, Metadata, end_block, start_block
from penstock.gateway.transports.grpc.messages import (
    Encoding,
    GrpcMessage,
    MessageReader,
    answer_encoding,
    compressed,
    decompressed,
    prefix,
)
from penstock.gateway.transports.sockets.connection import BodyPace, SocketSettings

logger = logging.getLogger("penstock.grpc")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionSettings(SocketSettings):
    """Seconds and bytes."""

    max_message_bytes: int
    compression_level: str = "none"
    max_connections: int = 8192
    message_idle_seconds: float = 60.0
    """Before `message_rate` is asked for, of a message that has begun and of a call's only one."""
    message_rate: float = 1024.0
    """Bytes per second."""
    message_seconds: float = 600.0
    """That a message may take to arrive."""


EOF = grpc.aio.EOF
_HIGH_WATER = 64 << 10
"""Bytes of a stream that wait for the client before its writer has to wait, too."""
_WHOLE_BYTES = 16 << 10
"""Up to this a message is sent in one piece with its prefix."""
_LONG_MESSAGE = 32 << 10
_MAX_WINDOW = 4 << 20
"""Of a long message so much may be on its way at a time."""
_OK = grpc.StatusCode.OK
_CODES = {code.name: code for code in grpc.StatusCode}


class Aborted(Exception):
    """The handler has ended its call with a status."""


class Wire(Protocol):
    """What a call needs of its connection."""

    def start(self, stream_id: int, block: bytes) -> None: ...
    def send(self, stream_id: int, data: bytes) -> None: ...
    def answer(self, stream_id: int, start: bytes, pieces: tuple[bytes, ...], end: bytes) -> None: ...
    def end(self, stream_id: int, block: bytes) -> None: ...
    def end_at_once(self, stream_id: int, block: bytes) -> None:
        """Without a message before it."""

    def unsent(self, stream_id: int) -> int: ...
    def credit(self, stream_id: int, size: int) -> None: ...
    def expect(self, stream_id: int, size: int) -> None: ...
    def over(self, call: GrpcCall) -> None:
        """The call's stream has ended; whether its handler has, `running` says. Told again when that has changed."""


class GrpcCall:
    """To its handler it is what `grpc.aio.ServicerContext` is to those that the library calls."""

    def __init__(
        self,
        wire: Wire,
        stream_id: int,
        head: CallHead,
        size: int,
        handler: grpc.RpcMethodHandler,
        settings: ConnectionSettings,
        share: ConnectionShare,
    ) -> None:
        self.stream_id = stream_id
        self.size = size
        """What the connection counts for it, beside its messages."""
        self.finished = False
        """Its stream is over: nothing is received or sent any more."""
        self.running = False
        """Its handler has begun and not ended."""
        self._wire = wire
        self._head = head
        self._handler = handler
        self._settings = settings
        self._answers: Encoding = answer_encoding(settings.compression_level, head.accepted)
        self._share = share
        self._held = 0
        """Bytes of messages that count in the connection's share."""
        self._reader = MessageReader(settings.max_message_bytes)
        self._unacknowledged = 0
        """Bytes for which the client has got no new window."""
        self._ended = False
        """The client has sent everything."""
        self._started = False
        """The head of the answer is sent."""
        self._trailing: Metadata = ()
        self._more: asyncio.Future[None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._entered = False
        """Its first line has run: a task that is cancelled before never runs any."""
        self._loop = asyncio.get_running_loop()
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waiting_since = self._loop.time()
        """Since then the handler, or a message that has begun, waits for bytes."""
        self._pace: BodyPace | None = None
        """Of that message, from the first look at it on."""
        if head.timeout is not None:
            self._deadline = self._loop.time() + head.timeout
            self._timer = self._loop.call_at(self._deadline, self._too_late)

    @property
    def begun(self) -> bool:
        """Its handler has what it needs to begin."""
        return self._task is not None

    # What the connection tells

    def begin(self) -> None:
        """Handlers of streams begin without a message."""
        if self._handler.request_streaming:
            self._run(self._stream)

    def receive(self, data: bytes, *, ended: bool) -> None:
        """A piece of the request's body."""
        reader = self._reader
        self._ended = ended
        self._unacknowledged += len(data)
        if self._task is not None and not self._handler.request_streaming:
            return  # a second message of a call that has one: nobody reads it, and the window ends it
        try:
            self._share.take(len(data))
            self._held += len(data)
            reader.feed(data)
            ready = reader.ready()
        except PenstockError as error:
            self.fail(error)
            return
        if ready:
            self._wake()
        else:
            self._acknowledge()
            if ended:
                self._end_of_messages()

    def _end_of_messages(self) -> None:
        if self._reader.size:
            self.fail(_cut())
        elif self._task is None:
            self.fail(InvalidRequestError("The call ends without a message."))
        else:
            self._wake()

    def _wake(self) -> None:
        if self._task is None:
            self._run(self._unary)
        elif self._more is not None and not self._more.done():
            self._more.set_result(None)

    def _acknowledge(self) -> None:
        """While no whole message waits, whatever has come may be followed by as much: only so can messages that are
        longer than windows arrive. What handlers do not read holds their clients back."""
        if self._unacknowledged and not self._ended:
            self._wire.credit(self.stream_id, self._unacknowledged)
            self._unacknowledged = 0
            missing = self._reader.missing
            if missing > _LONG_MESSAGE:
                self._wire.expect(self.stream_id, min(missing, _MAX_WINDOW))

    def _give_back(self) -> None:
        """What has been taken out of the reader: the code that took it counts it."""
        self._share.give_back(self._held - self._reader.size)
        self._held = self._reader.size

    def stalled(self, now: float) -> bool:
        """A message that has begun, or a call's only one, comes too slowly."""
        size, settings = self._reader.size, self._settings
        if self._ended or self._reader.whole or (self.running and not size):
            self._waiting_since, self._pace = now, None
            return False
        if self._pace is None:
            since = self._waiting_since
            self._pace = BodyPace(settings.message_idle_seconds, settings.message_rate, settings.message_seconds, since)
        return self._pace.late(now, size, waited=True)

    def room(self) -> None:
        """Less waits for the client than before."""
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def cancel(self) -> None:
        """The client has gone, or given the call up."""
        self._finish()

    def fail(self, error: Exception) -> None:
        """Ends the call with an error that no handler has found."""
        self._end(_CODES[wire_shape(error).grpc], public_message(error))

    def _too_late(self) -> None:
        self.fail(DeadlineExceededError("Deadline Exceeded"))

    # The handler's task

    def _run(self, serve: Callable[[], Awaitable[None]]) -> None:
        self.running = True
        self._task = self._loop.create_task(self._guarded(serve))

    async def _guarded(self, serve: Callable[[], Awaitable[None]]) -> None:
        self._entered = True
        try:
            await serve()
        except Aborted:
            pass
        except PenstockError as error:
            self.fail(error)
        except Exception as error:
            logger.error("an RPC failed", exc_info=error)
            self.fail(error)
        else:
            self._end(_OK, "")
        finally:
            if self.running:
                self.running = False
                if self.finished:
                    self._wire.over(self)
                else:  # the handler was cancelled by itself
                    self._end(grpc.StatusCode.CANCELLED, "The call was cancelled.")
            self._task = None

    async def _stream(self) -> None:
        await self._handler.stream_stream(None, self)

    async def _unary(self) -> None:
        message = self._take()
        data = await self._unpacked(message) if message.compressed else message.data
        if self._handler.response_streaming:
            await self._handler.unary_stream(data, self)
        else:
            await self._answer(await self._handler.unary_unary(data, self))

    def _end(self, code: grpc.StatusCode, details: str) -> None:
        if self.finished:
            return
        block = end_block(code.value[0], details, self._trailing)
        if self._started:
            self._wire.end(self.stream_id, block)
        else:
            self._wire.end_at_once(self.stream_id, start_block("identity") + block)
        self._finish()

    def _finish(self) -> None:
        if self.finished:
            return
        self.finished = True
        if self._timer is not None:
            self._timer.cancel()
        if self._held:
            self._reader.clear()
            self._give_back()
        if self.running and self._task is not asyncio.current_task(self._loop):
            self._cancel_handler()
        self._wire.over(self)

    def _cancel_handler(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self.running = self._entered  # else it never is

    # What the handler asks for

    def invocation_metadata(self) -> Metadata:
        return self._head.metadata

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self._loop.time())

    def set_trailing_metadata(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        self._trailing = tuple(metadata)

    async def read(self) -> Any:
        """The next message, or EOF. Raises PenstockError for what is no message, or too large a one, CancelledError
        where the call is over."""
        if self.finished:
            raise asyncio.CancelledError
        while not self._reader.ready():
            if self._ended:
                if self._reader.size:
                    raise _cut()
                return EOF
            self._more = self._loop.create_future()
            await self._more
        message = self._take()
        return await self._unpacked(message) if message.compressed else message.data

    def _take(self) -> GrpcMessage:
        message = self._reader.take()
        self._waiting_since, self._pace = self._loop.time(), None
        self._give_back()
        if not self._handler.request_streaming or not self._another_is_ready():
            self._acknowledge()
        return message

    def _another_is_ready(self) -> bool:
        """A fault of the next message is told when that is read: the one before it is good."""
        try:
            return self._reader.ready()
        except PenstockError:
            return True

    async def _unpacked(self, message: GrpcMessage) -> bytes:
        return await decompressed(message.data, self._head.encoding, self._settings.max_message_bytes)

    def write_now(self, data: bytes) -> bool:
        """False, and then nothing is written: it has to wait for the client, or for its compression."""
        if self._answers != "identity" or self.finished or self._wire.unsent(self.stream_id) > _HIGH_WATER:
            return False
        self._send(self._whole(data))
        return True

    async def write(self, data: bytes) -> None:
        """Returns when little of the stream waits for the client."""
        await self._write(data)
        while not self.finished and self._wire.unsent(self.stream_id) > _HIGH_WATER:
            self._room = self._loop.create_future()
            await self._room

    async def _write(self, data: bytes) -> None:
        packed = self._whole(data) if self._answers == "identity" else await self._packed(data)
        if self.finished:
            raise asyncio.CancelledError
        self._send(packed)

    def _send(self, pieces: tuple[bytes, ...]) -> None:
        if not self._started:
            self._started = True
            self._wire.start(self.stream_id, start_block(self._answers))
        for piece in pieces:
            self._wire.send(self.stream_id, piece)

    async def _answer(self, data: bytes) -> None:
        """The only message, and the end."""
        packed = self._whole(data) if self._answers == "identity" else await self._packed(data)
        if not self.finished:
            end = end_block(_OK.value[0], "", self._trailing)
            self._wire.answer(self.stream_id, start_block(self._answers), packed, end)
            self.running = False  # nothing comes behind this
            self._finish()

    async def _packed(self, data: bytes) -> tuple[bytes, ...]:
        """The message with its prefix, in pieces that need not be copied."""
        packed = await compressed(data, self._answers)
        return self._whole(data) if packed is None else self._whole(packed, compressed=True)

    @staticmethod
    def _whole(data: bytes, *, compressed: bool = False) -> tuple[bytes, ...]:
        head = prefix(len(data), compressed=compressed)
        return (head + data,) if len(data) <= _WHOLE_BYTES else (head, data)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        """Ends the call. Raises Aborted, or CancelledError where it is over."""
        if self.finished:
            raise asyncio.CancelledError
        self._end(code, details)
        raise Aborted


def _cut() -> InvalidRequestError:
    return InvalidRequestError("The call ends within a message.")
