"""The responses of one request, as they come."""

from __future__ import annotations

from asyncio import AbstractEventLoop, Future
from collections import deque
from collections.abc import Callable

from penstock.classic.base import CancellableStream, PushedStream, ResponseListener
from penstock.classic.call import Call
from penstock.classic.messages import InferRequest, InferResponse
from penstock.engines.errors import OverloadedError

MAX_UNREAD_RESPONSES = 16_384
MAX_UNREAD_BYTES = 256 * 2**20
"""What may lie in a stream that nobody reads; the last response may be of any size. Beyond it the request is cancelled,
and the stream ends with an OverloadedError instead of what was not read."""


class Stream(PushedStream, CancellableStream):
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
        call, self._call = self._call, None
        if call is not None:
            self._cancel(call)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class StreamCall(Call):
    """The caller reads a stream."""

    __slots__ = ("stream",)

    def __init__(self, request: InferRequest, batch_size: int, stream: Stream) -> None:
        super().__init__(request, batch_size)
        self.stream = stream
        stream.open(self)

    def deliver(self, response: InferResponse) -> None:
        self.stream.put(response)


def _byte_size(response: InferResponse) -> int:
    """Of the tensors; elements of BYTES tensors are objects of a size of their own."""
    return sum(
        sum(map(len, tensor.array.flat)) if tensor.datatype == "BYTES" else tensor.array.nbytes
        for tensor in response.outputs or ()
    )
