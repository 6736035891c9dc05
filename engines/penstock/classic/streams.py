"""The responses of one request, as they come."""

from __future__ import annotations

import asyncio
from asyncio import AbstractEventLoop, Future
from collections import deque
from collections.abc import Callable

from penstock.classic.base import CancellableStream, PacedStream, PushedStream, ResponseListener
from penstock.classic.call import Call
from penstock.classic.messages import InferRequest, InferResponse
from penstock.engines.errors import OverloadedError

MAX_UNREAD_RESPONSES = 16_384
MAX_UNREAD_BYTES = 256 * 2**20
"""What may lie in a stream that nobody reads; the last response may be of any size. Beyond it the request is cancelled,
and the stream ends with an OverloadedError instead of what was not read."""

AHEAD_RESPONSES = 1024
AHEAD_BYTES = 16 * 2**20
"""After so much, who sends to a paced stream looks whether there is room: half of what may be unread."""
_PATIENCE = 30.0
"""Seconds without anything read, after which a paced stream lets its model go on: it might wait for itself."""


class Stream(PushedStream, CancellableStream, PacedStream):
    """The `ResponseStream` of a call: one reader, one final response."""

    pushes = True

    def __init__(self, loop: AbstractEventLoop, cancel: Callable[[Call], None]) -> None:
        self._loop = loop
        self._cancel = cancel
        self._call: Call | None = None
        self._unread: deque[InferResponse] = deque()
        self._unread_bytes = 0
        self._reader: Future[None] | None = None
        self._listener: ResponseListener | None = None
        self._ended = False
        self.paced = False
        self._reads = 0
        self._room: Future[None] | None = None
        """Somebody waits for it."""

    def pace(self) -> None:
        self.paced = True

    async def has_room(self) -> None:
        while self.paced and not self._ended and self._is_full(2):
            reads = self._reads
            self._room = self._room or self._loop.create_future()
            await asyncio.wait((self._room,), timeout=_PATIENCE)
            if self._reads == reads:
                return

    def _is_full(self, parts: int) -> bool:
        """By one of so many parts of what may be unread."""
        return len(self._unread) * parts >= MAX_UNREAD_RESPONSES or self._unread_bytes * parts >= MAX_UNREAD_BYTES

    def _make_room(self) -> None:
        if self._room is not None and (self._ended or not self._is_full(4)):
            if not self._room.done():
                self._room.set_result(None)
            self._room = None

    def open(self, call: Call) -> None:
        self._call = call

    def put(self, response: InferResponse) -> None:
        if self._ended:
            return
        if response.final:
            self._call = None  # the call knows this stream: no request leaves a cycle
        if self._listener is not None:
            self._ended = response.final
            self._listener.take(response)
            return
        heavy = response.outputs and self._unread_bytes > MAX_UNREAD_BYTES
        if heavy or len(self._unread) >= MAX_UNREAD_RESPONSES:
            self.close()
            response = InferResponse(None, error=OverloadedError("too many responses have not been read"))
        self._ended = response.final
        self._unread.append(response)
        self._unread_bytes += _byte_size(response)
        self._wake()

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> InferResponse:
        while not self._unread:
            if self._ended:
                raise StopAsyncIteration
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._pop()

    def ready(self) -> InferResponse | None:
        return self._pop() if self._unread else None

    def listen(self, listener: ResponseListener | None) -> None:
        self._listener = listener
        while self._listener is not None and self._unread:
            self._listener.take(self._pop())

    def _pop(self) -> InferResponse:
        response = self._unread.popleft()
        self._unread_bytes -= _byte_size(response)
        self._reads += 1
        self._make_room()
        return response

    def cancel(self) -> bool:
        """A call that waits in the queue ends at once, with an error."""
        call = self._call
        if call is not None and call.batch is None:
            self._cancel(call)
        elif call is not None:
            call.cancelled = True
        return True

    def close(self) -> None:
        self._unread.clear()
        self._unread_bytes = 0
        if self._ended:
            return
        self._ended = True
        self._make_room()
        call, self._call = self._call, None
        if call is not None:
            self._cancel(call)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class StreamCall(Call):
    """The caller reads a stream."""

    __slots__ = ("_bytes_ahead", "_responses_ahead", "stream")

    def __init__(self, request: InferRequest, batch_size: int, stream: Stream) -> None:
        super().__init__(request, batch_size)
        self.stream = stream
        self._responses_ahead = self._bytes_ahead = 0
        stream.open(self)

    @property
    def paced(self) -> bool:
        return self.stream.paced

    async def has_room(self) -> None:
        await self.stream.has_room()

    def is_ahead(self, response: InferResponse) -> bool:
        if not self.stream.paced or response.final:
            return False
        self._responses_ahead += 1
        self._bytes_ahead += _byte_size(response)
        if self._responses_ahead < AHEAD_RESPONSES and self._bytes_ahead < AHEAD_BYTES:
            return False
        self._responses_ahead = self._bytes_ahead = 0
        return True

    def deliver(self, response: InferResponse) -> None:
        self.stream.put(response)


def _byte_size(response: InferResponse) -> int:
    """Of the tensors; elements of BYTES tensors are objects of a size of their own."""
    return sum(
        sum(map(len, tensor.array.flat)) if tensor.datatype == "BYTES" else tensor.array.nbytes
        for tensor in response.outputs or ()
    )
