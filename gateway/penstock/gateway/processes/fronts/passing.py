"""Requests that a front passes on to the supervisor, and their answers, on the one connection between these two. Each
has a number and a flow of its own: a slow client does not delay the other answers.

HTTP:  front: PassedRequest, pieces, BodyEnd.  supervisor: AnswerStart, pieces, AnswerEnd.
gRPC:  front: PassedCall, messages, BodyEnd.   supervisor: messages, CallEnd.

A side that cannot go on says PassedDropped; so does a front whose client has left.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import msgspec

from penstock.classic.python.worker.wire import Buffer
from penstock.gateway.processes.model_host.messages import ReadWindow, SendWindow

_PIECE = 128 << 10
"""Longer bodies and messages travel in pieces: what else is on the connection passes between these."""
_WINDOW = 1 << 20
"""Bytes of a body that are on their way, or unread at the other side."""


class PassedMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int
    """Of the request: the front's own, and never used twice."""


class PassedRequest(PassedMessage, frozen=True, kw_only=True):
    """An HTTP request, in ASGI's words."""

    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: list[tuple[bytes, bytes]]
    http_version: str
    scheme: str
    client: tuple[str, int] | None
    server: tuple[str, int | None] | None
    arrival: float
    """Of time.monotonic(), which all processes of a machine share."""


class PassedCall(PassedMessage, frozen=True, kw_only=True):
    """An RPC."""

    path: str
    metadata: list[tuple[str, Any]]
    """Values are str, or bytes where the name ends in -bin."""
    seconds: float | None
    """That are left of its time."""


class PassedPiece(PassedMessage, frozen=True):
    """A piece of a body, or of a message of gRPC: its bytes are behind it."""

    size: int
    is_last: bool
    """Of its message."""


class BodyEnd(PassedMessage, frozen=True):
    """The end of an HTTP request, or of the messages of an RPC."""


class AnswerStart(PassedMessage, frozen=True):
    """The start of an HTTP answer."""

    status: int
    headers: list[tuple[bytes, bytes]]


class AnswerEnd(PassedMessage, frozen=True):
    """The end of an HTTP answer."""


class CallEnd(PassedMessage, frozen=True):
    """The end of an RPC."""

    code: int
    details: str
    metadata: list[tuple[str, Any]]


class PassedRead(PassedMessage, frozen=True):
    """So many pieces, with so many bytes, have been read."""

    pieces: int
    size: int


class PassedDropped(PassedMessage, frozen=True):
    """The sender of this goes on with the request no more."""


FromPassing: TypeAlias = PassedRequest | PassedCall | PassedPiece | BodyEnd | PassedRead | PassedDropped
FromAnswering: TypeAlias = PassedPiece | AnswerStart | AnswerEnd | CallEnd | PassedRead | PassedDropped
_Flowing: TypeAlias = BodyEnd | AnswerStart | AnswerEnd | CallEnd


class Tell(Protocol):
    """Sends a message to the other side, and bytes behind it."""

    def __call__(self, message: Any, *, tail: Buffer = b"") -> None: ...


class Passage:
    """A request on the connection, as either side has it. Not for several tasks that read, or several that write, at
    one time."""

    def __init__(self, number: int, tell: Tell, forget: Callable[[], object]) -> None:
        """`forget` is called at the end, once or more."""
        self.number = number
        self.on_lost: Callable[[], object] | None = None
        """Called when the other side does not go on."""
        self._tell = tell
        self._forget = forget
        self._loop = asyncio.get_running_loop()
        self._sent = SendWindow(_WINDOW)
        self._read = ReadWindow(_WINDOW)
        self._unread: deque[_Flowing | tuple[bytes, bool]] = deque()
        """Pieces as their bytes, and whether these end a message."""
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._is_answered = False
        self._is_lost = False

    # Sending

    def say(self, message: PassedRequest | PassedCall | _Flowing) -> None:
        self._is_answered = self._is_answered or isinstance(message, AnswerEnd | CallEnd)
        self._tell(message)

    async def send(self, data: bytes) -> None:
        """Some of a body. Returns when little waits for the other side. Raises ConnectionError."""
        view = memoryview(data)
        for start in range(0, len(data), _PIECE):
            await self._send_piece(view[start : start + _PIECE], True)

    async def send_message(self, data: bytes) -> None:
        """The same, for a message of gRPC: it is received as a whole."""
        view = memoryview(data)
        for start in range(0, len(data) or 1, _PIECE):
            await self._send_piece(view[start : start + _PIECE], start + _PIECE >= len(data))

    async def _send_piece(self, data: memoryview, is_last: bool) -> None:
        while not self._sent.open and not self._is_answered and not self._is_lost:
            self._writer = self._loop.create_future()
            await self._writer
        if self._is_answered or self._is_lost:
            raise _dropped()
        self._sent.sent(len(data))
        self._tell(PassedPiece(self.number, len(data), is_last), tail=data)

    # Receiving

    def heard(self, message: FromPassing | FromAnswering, tail: memoryview) -> None:
        """What the other side has said."""
        match message:
            case PassedRead():
                self._sent.taken(message.pieces, message.size)
                _wake(self._writer)
            case PassedDropped():
                self.lost()
            case PassedPiece():
                self._unread.append((bytes(tail[: message.size]), message.is_last))
                _wake(self._reader)
            case BodyEnd() | AnswerStart() | AnswerEnd() | CallEnd():
                self._is_answered = self._is_answered or isinstance(message, AnswerEnd | CallEnd)
                self._unread.append(message)
                _wake(self._reader)
                if self._is_answered:
                    _wake(self._writer)

    async def receive(self) -> bytes | _Flowing:
        """The next piece of a body, message of gRPC, or something else. Raises ConnectionError where there is none."""
        message = await self._next()
        if not isinstance(message, tuple):
            return message
        data, is_last = message
        if is_last:
            return data
        pieces = [data]
        while not is_last and isinstance(message := await self._next(), tuple):
            data, is_last = message
            pieces.append(data)
        return b"".join(pieces)

    async def _next(self) -> _Flowing | tuple[bytes, bool]:
        while not self._unread:
            if self._is_lost:
                raise _dropped()
            self._reader = self._loop.create_future()
            await self._reader
        message = self._unread.popleft()
        if isinstance(message, tuple):
            report = self._read.take(len(message[0]))
            if report is not None and not self._is_lost:
                self._tell(PassedRead(self.number, *report))
        return message

    # The end

    def lost(self) -> None:
        """The other side goes on no more, or is gone. What it has sent can still be read."""
        self._is_lost = True
        _wake(self._reader)
        _wake(self._writer)
        if self.on_lost is not None:
            self.on_lost()

    def close(self) -> None:
        """This side goes on no more: the other one is told, if there is no whole answer. Idempotent."""
        self.on_lost = None
        self._unread.clear()
        if not self._is_lost:
            if not self._is_answered:
                self._tell(PassedDropped(self.number))
            self.lost()
        self._forget()


def _wake(waiting: asyncio.Future[None] | None) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(None)


def _dropped() -> ConnectionError:
    return ConnectionResetError("the other side has given the request up")
