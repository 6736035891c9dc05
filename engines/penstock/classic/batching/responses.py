"""Responses on their way back: from the threads that make them to the event loop, in the order of `preserve_ordering`,
and into the stream that a caller reads.
"""

from __future__ import annotations

import asyncio
import threading
from asyncio import AbstractEventLoop, Future, Task
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from penstock.classic.base import CancellableStream, PacedStream, PushedStream, ResponseListener
from penstock.classic.batching.batch import QueuedCall
from penstock.classic.messages import InferRequest, InferResponse
from penstock.engines.errors import OverloadedError, PenstockError

MAX_UNREAD_RESPONSES = 16_384
MAX_UNREAD_BYTES = 256 * 2**20
"""What may lie in a stream that nobody reads; the last response may be of any size. Beyond it the request is cancelled,
and the stream ends with an OverloadedError instead of what was not read."""

AHEAD_RESPONSES = 1024
AHEAD_BYTES = 16 * 2**20
"""After so much, who sends to a paced stream looks whether there is room: half of what may be unread."""
_PATIENCE = 30.0
"""Seconds without anything read, after which a paced stream lets its model go on: it might wait for itself."""


class CallStream(PushedStream, CancellableStream, PacedStream):
    """The `ResponseStream` of a call: one reader, one final response."""

    pushes = True

    def __init__(self, loop: AbstractEventLoop, cancel: Callable[[QueuedCall], None]) -> None:
        self._loop = loop
        self._cancel = cancel
        self._call: QueuedCall | None = None
        self._unread: deque[InferResponse] = deque()
        self._unread_bytes = 0
        self._reader: Future[None] | None = None
        self._listener: ResponseListener | None = None
        self._ended = False
        self.paced = False
        self._reads = 0
        self._room: Future[None] | None = None
        """What a sender that is slowed down waits for."""

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

    def open(self, call: QueuedCall) -> None:
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

    def __aiter__(self) -> CallStream:
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


class StreamCall(QueuedCall):
    """The caller reads a stream."""

    __slots__ = ("_bytes_ahead", "_responses_ahead", "stream")

    def __init__(self, request: InferRequest, batch_size: int, stream: CallStream) -> None:
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


MAX_POSTED = 1024
"""Responses on their way to the loop, beyond which a sending thread waits."""

MAX_WAIT = 1.0
"""Seconds that it waits at most: a loop that does not turn must not hold a model's thread for ever."""

READER_WAIT = 60.0
"""Seconds that it waits at most for a reader, after which it looks again when it has sent more."""


class Outbox:
    """Responses from any thread, in order, to one receiver on the loop. Those that come close together share a
    wake-up; those of the loop's own thread need none."""

    def __init__(self, loop: AbstractEventLoop, receive: Callable[[QueuedCall, InferResponse], None]) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._receive = receive
        self._posted: deque[tuple[QueuedCall, InferResponse]] = deque()
        self._awake = False
        self._flushed = threading.Event()

    def post(self, call: QueuedCall, response: InferResponse) -> None:
        self._posted.append((call, response))
        if threading.get_ident() == self._thread:
            self.flush()
            return
        if not self._awake:
            self._awake = True
            try:
                self._loop.call_soon_threadsafe(self.flush)
            except RuntimeError:
                return  # the loop has been closed: there is nobody left to tell
        if len(self._posted) > MAX_POSTED:
            self._wait_for_loop()
        if call.is_ahead(response):
            self._wait_for_reader(call)

    def _wait_for_reader(self, call: QueuedCall) -> None:
        with suppress(RuntimeError, TimeoutError):  # the loop may end
            asyncio.run_coroutine_threadsafe(call.has_room(), self._loop).result(READER_WAIT)

    def _wait_for_loop(self) -> None:
        """A thread that sends faster than the loop can take waits for the loop; for a reader it waits only where that
        paces it."""
        self._flushed.clear()
        # It may have been flushed before the flag was cleared. After it, the flush that is on its way sets the flag.
        if len(self._posted) > MAX_POSTED:
            self._flushed.wait(MAX_WAIT)

    def flush(self) -> None:
        """On the loop: hands over what has been posted until now."""
        # First the flag: what is posted from now on either is seen below or wakes the loop again.
        self._awake = False
        posted = self._posted
        # No more than was there, or a thread that posts without a pause would never let the readers have their turn.
        for _ in range(len(posted)):
            if not posted:
                break
            call, response = posted.popleft()
            self._receive(call, response)
        if not self._flushed.is_set():
            self._flushed.set()


class ResponseOrder:
    """Holds the responses of a request back until all requests before it have had their last one."""

    def __init__(self) -> None:
        self._line: deque[QueuedCall] = deque()
        self._held: dict[QueuedCall, list[InferResponse]] = {}

    def enter(self, call: QueuedCall) -> None:
        """It is executed now, perhaps not for the first time."""
        if call in self._held:
            return
        self._line.append(call)
        self._held[call] = []

    def deliver(self, call: QueuedCall, response: InferResponse) -> None:
        held = self._held.get(call)
        if held is None:
            return
        held.append(response)
        self._release()

    def leave(self, call: QueuedCall) -> None:
        """It ends without a response through here."""
        if self._held.pop(call, None) is not None:
            self._release()

    def _release(self) -> None:
        line = self._line
        while line:
            call = line[0]
            held = self._held.get(call)
            if held is not None:
                for response in held:
                    call.deliver(response)
                if not (held and held[-1].final):
                    held.clear()
                    return
                del self._held[call]
            line.popleft()


class OneResponse:
    """A ResponseStream over an `infer` that has begun."""

    def __init__(self, inferring: Task[InferResponse]) -> None:
        self._inferring: Task[InferResponse] | None = inferring

    def __aiter__(self) -> OneResponse:
        return self

    async def __anext__(self) -> InferResponse:
        inferring = self._inferring
        if inferring is None:
            raise StopAsyncIteration
        try:
            return await inferring
        except PenstockError as error:
            return InferResponse(None, error=error)
        finally:
            self._inferring = None

    def ready(self) -> InferResponse | None:
        return None

    def close(self) -> None:
        if self._inferring is not None:
            self._inferring.cancel()
            self._inferring = None
